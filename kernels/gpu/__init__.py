"""The backends over .cu kernels: `emulate` on NumPy arrays, `cuda` on CuPy arrays. Rows are launched by plain.py and fast.py."""

COUNTERS = 4096  # f32 at the start of every workspace: u32 counters, zero when allocated, left at zero by kernels
