"""Published training steps beside modelled ones: how far the modelled clock can be trusted.

python -m benchmarks.published  # all rows, five to fifteen minutes
python -m benchmarks.published --chip a100 --row torchtune
"""
