"""What the commands print: results on standard output, everything else on standard error."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twinpool.results import Completion


def print_error(message: str) -> None:
    """Prints ``error: cause; remedy`` on one line."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """Prints a dataclass, mapping or list as indented JSON."""
    print(json.dumps(to_plain(value), indent=2, ensure_ascii=False))


def to_plain(value: Any) -> Any:
    """``value`` with dataclasses as mappings."""
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value


def print_pairs(pairs: Mapping[str, str]) -> None:
    """Prints aligned ``name  value`` lines."""
    width = max(map(len, pairs), default=0)
    for name, value in pairs.items():
        print(f"  {name:<{width}}  {value}")


def print_nested(values: Mapping[str, Any], indent: int = 0) -> None:
    """Prints a mapping of mappings, or of lists of them, as indented lines; a figure (median, p90, ...) takes one."""
    for name, value in values.items():
        label = f"{' ' * indent}{name}"
        if isinstance(value, Mapping) and "median" in value:
            text = f"{value['median']:10.3f}   p90 {value['p90']:.3f}, least {value['least']:.3f}, n {value['count']}"
            print(f"{label:<36}{text}")
        elif isinstance(value, Mapping):
            print(label)
            print_nested(value, indent + 2)
        elif isinstance(value, list):
            for item in value:
                print(label)
                print_nested(item, indent + 2)
        else:
            shown = "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)
            print(f"{label:<36}{shown:>10}")


def write(text: str) -> None:
    """Prints a piece of streamed text at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def usage_pairs(result: Completion) -> dict[str, str]:
    """Where the prompt's KV came from and where the time went, for people."""
    usage, timings = result.usage, result.timings
    decode_tokens = max(0, usage.completion_tokens - 1)
    rate = f" ({decode_tokens / timings.decode_s:.0f} tokens/s)" if timings.decode_s > 0 and decode_tokens else ""
    pairs = {
        "prompt": f"{usage.prompt_tokens} tokens",
        "  prefill worker": f"{usage.prefill_computed_tokens} computed, {usage.prefill_cached_tokens} cached"
        f"  [{result.prefill_worker or 'not used'}]",
        "  decode worker": f"{usage.remote_tokens} remote, {usage.decode_cached_tokens} cached, "
        f"{usage.decode_computed_tokens} computed  [{result.decode_worker}]",
        "answer": f"{usage.completion_tokens} tokens, ended by {result.finish_reason}",
        "route": usage.route_reason,
        "request": result.request_id,
    }
    if usage.transfer_bytes:
        pairs["KV transfer"] = f"{usage.transfer_bytes / 1e6:.2f} MB over {usage.transport}"
    pairs |= {
        "time": f"{timings.total_s * 1e3:.1f} ms, first token after {timings.first_token_s * 1e3:.1f} ms",
        "  queue": f"{timings.queue_s * 1e3:.1f} ms",
        "  prefill": f"{timings.prefill_s * 1e3:.1f} ms",
        "  transfer": f"{timings.transfer_s * 1e3:.1f} ms, {timings.exposed_transfer_s * 1e3:.1f} ms of it exposed",
        "  decode": f"{timings.decode_s * 1e3:.1f} ms{rate}",
    }
    return pairs
