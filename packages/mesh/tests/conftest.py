"""Starts what ranks are forked from before any test's clock runs."""

import mesh_ranks


def pytest_collection_finish() -> None:
    mesh_ranks.prepare()
