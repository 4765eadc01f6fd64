"""``python -m cdi_courier`` is the command ``cdi-courier``."""

from cdi_courier.cli import main

if __name__ == "__main__":
    main()
