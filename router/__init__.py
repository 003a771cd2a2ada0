"""Routes requests through both pools; never imports torch."""
