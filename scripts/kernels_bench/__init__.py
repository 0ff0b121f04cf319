"""What ``bench_kernels.py`` is made of: cases as data, clocks, rates, sweeps and goals."""
