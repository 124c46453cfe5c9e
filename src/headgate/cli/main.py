"""The `headgate` command."""


def main() -> None:
    print("headgate")
