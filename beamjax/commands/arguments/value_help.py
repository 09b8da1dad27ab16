"""How the values on a command line are read; needs no JAX, as `--help` does."""

VALUES = """\
how VALUE is read:
  3  0.1  true  null        a scalar, as in Python
  [[1, 2], [3, 4]]          numbers in a list: an array; any other JSON: a tree of such
  float32:0.1  uint8:[1,2]  an array of this dtype
  key:0                     jax.random.key(0)
  w.npy  w.npz  w.json      an array, or a tree of arrays: names in an .npz are paths,
                            "layers/0/w"; w.npz#at=layers/0 takes a part of it
  range:1000000             members 0, 1, 2, ... (bj.from_range)
  rows/*.parquet  rows.arrow  data.zarr  x.tfrecord  x.array_record
                            members in files, read by the workers (bj.from_parquet, ...)
  'data/*.npy'              likewise, the rows of several files, one after the other
  FOLDER                    of a kept result (placed.json, keys.json) or of Zarr
  KIND:PATH                 for names that don't tell: npy: npz: (members in files) array:
                            parquet: arrow: zarr: tfrecord: array_record: npy_parts: placed:
                            keyed: json:
  PATH#name=x&other=1,2     with arguments of the function that opens it:
                            'rows/*.parquet#columns=x,label&buckets=16,64'
                            'x.tfrecord#image=uint8[28,28]&label=int32[]'
An array goes to the workers by shards where the program uses it as a placed value; a big .npy file
that is used so is read by the workers themselves.
"""
