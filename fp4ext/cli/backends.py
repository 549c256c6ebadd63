"""The command `backends`."""


def add_backends(commands) -> None:
    p = commands.add_parser("backends", help="what this machine has, and why not the others")
    p.set_defaults(run=run_backends)


def run_backends(args) -> int:
    """The `backends` command."""
    import fp4ext

    for name, state in fp4ext.backends().items():
        print(f"{name:10} {state}")
    return 0
