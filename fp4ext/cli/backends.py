"""The command `backends`."""


def add_backends(p) -> None:
    """It has no options."""


def run_backends(args) -> int:
    """The `backends` command."""
    import fp4ext

    for name, state in fp4ext.backends().items():
        print(f"{name:10} {state}")
    return 0
