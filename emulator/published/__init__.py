"""Published training steps beside modelled ones: how far the modelled clock can be trusted.

python -m published            # from emulator/; all rows, five to fifteen minutes
python -m published --chip a100 --row torchtune
"""
