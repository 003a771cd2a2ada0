"""The command line."""

import os
import sys

# gRPC reads this when it is imported. A command's error is one line; servers show what gRPC says, of handshakes that
# failed for example.
if sys.argv[1:2] not in (["serve"], ["up"]):
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
