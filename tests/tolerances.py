"""The tolerances of all tests. Loosened only in a commit that says why."""

EXACT = {"rtol": 0.0, "atol": 1e-6}  # hand-worked numbers
FP32 = {"rtol": 1e-4, "atol": 1e-6}  # two orders of summation in float32
RELATIVE = 1e-4  # largest difference over largest value, for gradients
