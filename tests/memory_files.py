"""A file system of Beam that is in the memory of this process."""

import io

from apache_beam.io.filesystem import BeamIOError, FileMetadata, FileSystem

FILES = {}
"""The content of each file, by URL."""


class InMemory(FileSystem):
    """Files of this process, `inmemory://folder/name`."""

    @classmethod
    def scheme(cls):
        return "inmemory"

    def join(self, basepath, *paths):
        return "/".join([basepath.rstrip("/"), *paths])

    def split(self, path):
        return tuple(path.rsplit("/", 1))

    def mkdirs(self, path):
        pass

    def has_dirs(self):
        return False

    def _list(self, dir_or_prefix):
        for path, data in list(FILES.items()):
            if path.startswith(dir_or_prefix):
                yield FileMetadata(path, len(data))

    def create(self, path, mime_type="", compression_type=None):
        class File(io.BytesIO):
            def close(self):
                if not self.closed:
                    FILES[path] = self.getvalue()
                super().close()

        return File()

    def open(self, path, mime_type="", compression_type=None):
        if path not in FILES:
            raise BeamIOError(path)
        return io.BytesIO(FILES[path])

    def exists(self, path):
        return path in FILES

    def size(self, path):
        return len(FILES[path])

    def delete(self, paths):
        for path in paths:
            FILES.pop(path, None)

    def rename(self, sources, destinations):
        for old, new in zip(sources, destinations, strict=True):
            FILES[new] = FILES.pop(old)

    def metadata(self, path):
        return FileMetadata(path, self.size(path))


InMemory.__abstractmethods__ = frozenset()  # `copy` and the like are never called.
