"""What this machine can do: doctor, calibration, ``bench-io``."""
