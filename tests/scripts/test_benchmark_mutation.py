"""The mutation benchmark names modules and test files that exist."""

from benchmarks import mutation


def test_modules_and_tests_exist():
    assert mutation.QUICK in mutation.FILES
    for module, files in mutation.FILES.items():
        assert (mutation.ROOT / mutation.module_path(module)).is_file(), module
        assert all((mutation.ROOT / "tests" / name).is_file() for name in files), module
