"""Files under `bjtest://`, for fsspec a file system of its own, which an import makes known."""

import os

import fsspec
from fsspec.implementations.local import LocalFileSystem


class UrlFileSystem(LocalFileSystem):
    """Files under `bjtest://`; really local ones. Renaming does not replace a file."""

    protocol = "bjtest"

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("bjtest:/"))

    def mv(self, old, new, **kwargs):
        assert not self.exists(new), "not all file systems replace"
        os.rename(self._strip_protocol(old), self._strip_protocol(new))


fsspec.register_implementation("bjtest", UrlFileSystem, clobber=True)
