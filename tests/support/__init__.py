"""What tests and the demo stand on: real runtimes, and hosts to run them on."""

import os

# gRPC starts threads in whatever is forked from a process that has used it, and a process with threads cannot
# enter a mount namespace, which tests of live injection do.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
