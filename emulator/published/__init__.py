"""Published training steps beside modelled ones: how far the modelled clock can be trusted.

python -m published            # from emulator/; all rows, some ten minutes
python -m published --chip a100 --row torchtune
"""
