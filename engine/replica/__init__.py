"""One loaded model as the Trio thread has it: its step loop, its worker thread, the watchdog and
the telemetry."""
