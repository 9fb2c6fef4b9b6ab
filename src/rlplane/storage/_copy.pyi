import numpy as np
from numpy.typing import NDArray

def work(job: NDArray[np.int64], waits: bool, /) -> None: ...
