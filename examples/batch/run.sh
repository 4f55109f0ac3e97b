#!/bin/sh
# A file of requests, answered by an engine of its own without a port. Run it again with --resume
# after an interruption.
set -e
cd "$(dirname "$0")"
octavo run-batch --model demo://smollm2 --served-model-name smollm2 \
  -i requests.jsonl -o "${1:-answers.jsonl}"
