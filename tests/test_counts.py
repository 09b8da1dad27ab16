"""Each thread counts for itself."""

import threading

from beamjax.counts import counts


def test_threads_count_for_themselves():
    before, found = counts.broadcasts, []

    def work():
        counts.broadcasts += 1
        found.append(counts.broadcasts)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [1]
    assert counts.broadcasts == before
