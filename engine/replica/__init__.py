"""One loaded model on the Trio thread: its step loop, its threads, the watchdog, the telemetry."""
