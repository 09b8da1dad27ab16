"""Names of `jax.extend.core`, without the other modules of `jax.extend`.

To import any of these imports all, among them Pallas, which takes 17 ms of processor time.
"""

from typing import TYPE_CHECKING

from jax._src import core
from jax._src.core import Jaxpr as Jaxpr
from jax._src.core import Literal as Literal
from jax._src.core import Primitive as Primitive
from jax._src.core import gensym as gensym
from jax._src.core import jaxpr_as_fun as jaxpr_as_fun
from jax._src.core import jaxprs_in_params as jaxprs_in_params
from jax._src.core import subjaxprs as subjaxprs

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr as ClosedJaxpr
else:
    ClosedJaxpr = getattr(core, "ClosedJaxpr", Jaxpr)  # in JAX 0.12 every jaxpr is one
