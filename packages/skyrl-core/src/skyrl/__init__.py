"""The core trainer's import name.

Another published distribution, also called skyrl, owns the same name: with both installed, files of the two would be
mixed, so that is refused at once.
"""

from importlib.metadata import PackageNotFoundError, version


def _refuse_the_other_owner() -> None:
    try:
        other = version("skyrl")
    except PackageNotFoundError:
        return
    raise ImportError(
        f"two distributions own the import name 'skyrl': skyrl-core (this one) and skyrl {other}. "
        "Uninstall one of them: `pip uninstall skyrl` keeps skyrl-core"
    )


_refuse_the_other_owner()
