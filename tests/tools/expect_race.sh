#!/bin/sh
# Runs a ThreadSanitizer build whose bug was planted, and passes only when the sanitizer reports it:
# exit status 66 and a data race in the report. A crash, a hang that the caller cuts, a failed CHECK
# or a clean run all fail.
output=$("$@" 2>&1)
status=$?
printf '%s\n' "$output" | head -n 60
case $output in
  *"WARNING: ThreadSanitizer: data race"*) reported=yes ;;
  *) reported=no ;;
esac
if [ "$status" -eq 66 ] && [ "$reported" = yes ]; then
  echo "the planted race was reported"
  exit 0
fi
echo "planted race not caught: exit status $status (need 66), data race in report: $reported"
exit 1
