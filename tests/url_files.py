"""Files under `bjtest://`, for Beam a file system of its own, which an import makes known."""

import os

from apache_beam.io.filesystem import FileMetadata
from apache_beam.io.localfilesystem import LocalFileSystem


class UrlFileSystem(LocalFileSystem):
    """Files under `bjtest://`, as another file system that Beam knows; really local ones."""

    @classmethod
    def scheme(cls):
        return "bjtest"

    def join(self, basepath, *paths):
        return "/".join([basepath.rstrip("/"), *paths])

    @staticmethod
    def _local(path):
        return path.removeprefix("bjtest:/")

    def _list(self, dir_or_prefix):
        for metadata in super()._list(self._local(dir_or_prefix)):
            metadata.path = f"bjtest:/{metadata.path}"
            yield metadata

    def create(self, path, *args, **kwargs):
        return super().create(self._local(path), *args, **kwargs)

    def open(self, path, *args, **kwargs):
        return super().open(self._local(path), *args, **kwargs)

    def rename(self, source_file_names, destination_file_names):
        names = zip(source_file_names, destination_file_names, strict=True)
        for source, destination in names:
            assert not self.exists(destination), "not all file systems replace"
            os.rename(self._local(source), self._local(destination))

    def exists(self, path):
        return super().exists(self._local(path))

    def size(self, path):
        return super().size(self._local(path))

    def metadata(self, path):
        found = super().metadata(self._local(path))
        return FileMetadata(path, found.size_in_bytes, found.last_updated_in_seconds)

    def last_updated(self, path):
        return super().last_updated(self._local(path))

    def delete(self, paths):
        for path in paths:
            os.remove(self._local(path))
