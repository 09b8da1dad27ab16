"""A file system of fsspec that is in the memory of this process."""

import io

import fsspec

FILES = {}
"""The content of each file, by URL."""


class InMemory(fsspec.AbstractFileSystem):
    """Files of this process, `inmemory://folder/name`."""

    protocol = "inmemory"

    @classmethod
    def _strip_protocol(cls, path):
        return path

    def ls(self, path, detail=True, **kwargs):
        found = [self.info(name) for name in list(FILES) if name.startswith(f"{path}/")]
        return found if detail else [entry["name"] for entry in found]

    def info(self, path, **kwargs):
        if path not in FILES:
            raise FileNotFoundError(path)
        return {"name": path, "size": len(FILES[path]), "type": "file"}

    def pipe_file(self, path, value, **kwargs):
        FILES[path] = bytes(value)

    def cat_file(self, path, start=None, end=None, **kwargs):
        if path not in FILES:
            raise FileNotFoundError(path)
        return FILES[path][start:end]

    def open(self, path, mode="rb", **kwargs):
        return io.BytesIO(self.cat_file(path))

    def makedirs(self, path, exist_ok=False):
        pass

    def rm(self, paths, **kwargs):
        for path in paths:
            FILES.pop(path, None)

    def rm_file(self, path):
        del FILES[path]

    def mv(self, old, new, **kwargs):
        FILES[new] = FILES.pop(old)


fsspec.register_implementation("inmemory", InMemory, clobber=True)
