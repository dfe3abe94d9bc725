"""Processes that tokenise: plain children without torch, fed through a pipe, that end with their parent."""

from __future__ import annotations

import os
import pickle
import queue
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from multiprocessing.connection import Connection, Pipe
from typing import Any

from lowmem.data.chunks import Chunk, Item, RowTokenizer
from lowmem.errors import UserError

PATIENCE = 2.0  # seconds of work after which processes are worth their start
MOST = 4  # by default: one process reads for all
# the parent's module path and no `__main__`: a script without `if __name__ == "__main__"` must not run again
_START = (
    "import sys; path, number = sys.argv[1:]; sys.path[:] = path.split('\\n'); "
    "from lowmem.data.workers import serve; serve(int(number))"
)


def in_order(work: RowTokenizer, chunks: Iterator[list[Item]], num_workers: int | None) -> Generator[Chunk, None, None]:
    """`map(work, chunks)`, in processes where that pays.

    Args:
        work: what to do.
        chunks: rows; read in this process, a few chunks ahead.
        num_workers: processes; 0: none; None: none for the first `PATIENCE` seconds.

    Raises:
        UserError: a process has died, or rows or tokenizer cannot be sent to one.
    """
    if num_workers is None:
        start = time.monotonic()
        for chunk in chunks:
            yield work(chunk)
            if time.monotonic() - start > PATIENCE:
                break
        num_workers = automatic(work)
    if not num_workers:
        yield from map(work, chunks)
        return
    with closing(_Pool(work, num_workers).map(chunks)) as results:
        yield from results


def automatic(work: RowTokenizer) -> int:
    """Processes that a large source is worth: none for a tokenizer that cannot be sent to one."""
    number = min(MOST, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    return number if number > 1 and type(work.tokenizer).__module__ != "__main__" and _sendable(work) else 0


def _sendable(work: RowTokenizer) -> bool:
    try:
        pickle.dumps(work)
    except Exception:  # pickling runs code of any class
        return False
    return True


class _Pool:
    """Worker processes; each is spoken to by one thread at a time."""

    def __init__(self, work: RowTokenizer, number: int):
        try:
            self.work = pickle.dumps(work)
        except Exception as error:  # pickling runs code of any class
            raise UserError(
                f"data.num_workers: the tokenizer cannot be sent to a process ({error}); set it to 0"
            ) from None
        self.number = number
        self.free: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self.workers: list[_Worker] = []

    def map(self, chunks: Iterator[list[Item]]) -> Generator[Chunk, None, None]:
        """The chunks' results in their order; whatever happens, no process is left."""
        waiting: deque[Future[Chunk]] = deque()
        fault: list[Exception] = []
        threads = ThreadPoolExecutor(self.number, thread_name_prefix="lowmem-tokenise")
        try:
            for chunk in _until(chunks, fault):
                if len(self.workers) < self.number:
                    self.workers.append(_Worker(self.work))
                    self.free.put(self.workers[-1])
                waiting.append(threads.submit(self._call, chunk))
                if len(waiting) > 2 * self.number:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
            for worker in self.workers:
                worker.kill()
            threads.shutdown()
        if fault:  # the source's own: it comes after the rows before it
            raise fault[0]

    def _call(self, chunk: list[Item]) -> Chunk:
        worker = self.free.get()
        try:
            return worker.call(chunk)
        finally:
            self.free.put(worker)


class _Worker:
    def __init__(self, work: bytes):
        self.pipe, theirs = Pipe()
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        try:
            # a session of its own: Ctrl-C is the parent's business, which ends it
            self.process = subprocess.Popen(
                [sys.executable, "-c", _START, "\n".join(sys.path), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # the parent's output may be read by a program
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise UserError(f"data.num_workers: no process can be started ({error.strerror}); set it to 0") from None
        finally:
            theirs.close()
        self.first: bytes | None = work

    def call(self, chunk: list[Item]) -> Chunk:
        try:
            message = pickle.dumps(chunk, pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # pickling runs code of any class
            raise UserError(f"data.num_workers: rows cannot be sent to a process ({error}); set it to 0") from None
        try:
            if self.first is not None:
                self.pipe.send_bytes(self.first)
                self.first = None
            self.pipe.send_bytes(message)
            answer = self.pipe.recv_bytes()
        except (EOFError, OSError):
            raise UserError(
                f"a process that tokenises has died (exit status {self.process.wait()}; -9: no memory left?); "
                "set data.num_workers to a smaller number, or to 0"
            ) from None
        found: Chunk | _Fault = pickle.loads(answer)
        if isinstance(found, _Fault):
            return Chunk(len(chunk), error=found.error())
        return found

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.pipe.close()


class _Fault:
    """An exception on its way between processes: many classes cannot be built again from their `args`."""

    def __init__(self, error: Exception):
        self.kind: type[Exception] = type(error)
        self.content = (error.args, vars(error))

    def error(self) -> Exception:
        made = self.kind.__new__(self.kind, *self.content[0])
        made.__dict__.update(self.content[1])
        return made


def serve(number: int) -> None:
    """The life of a worker process: the work, then chunks, until the parent closes the pipe or is gone.

    Args:
        number: file descriptor of the pipe.
    """
    pipe = Connection(number)
    work: Callable[[list[Item]], Chunk] | None = None
    try:
        first = pipe.recv_bytes()
        while True:
            message = pipe.recv_bytes()
            pipe.send_bytes(_answer(work := work or _loaded(first), message))
    except (EOFError, OSError):
        return


def _loaded(first: bytes) -> Callable[[list[Item]], Chunk]:
    try:
        work: Callable[[list[Item]], Chunk] = pickle.loads(first)
    except Exception as error:  # unpickling runs code of any class
        text = f"data.num_workers: the tokenizer cannot be rebuilt in a process ({error}); set it to 0"
        return lambda items: Chunk(len(items), error=UserError(text))
    return work


def _answer(work: Callable[[list[Item]], Chunk], message: bytes) -> bytes:
    try:
        items: list[Item] = pickle.loads(message)
    except Exception as error:  # unpickling runs code of any class
        text = f"data.num_workers: rows cannot be rebuilt in a process ({error}); set it to 0"
        return pickle.dumps(_Fault(UserError(text)))
    chunk = work(items)
    if chunk.error is None:
        return pickle.dumps(chunk, pickle.HIGHEST_PROTOCOL)
    try:
        answer = pickle.dumps(_Fault(chunk.error))
        pickle.loads(answer).error()
    except Exception:  # an exception that holds what cannot be sent
        answer = pickle.dumps(_Fault(RuntimeError(f"{type(chunk.error).__name__}: {chunk.error}")))
    return answer


def _until(chunks: Iterable[list[Item]], fault: list[Any]) -> Iterator[list[Item]]:
    """The chunks up to a fault of their source, which is put aside."""
    try:
        yield from chunks
    except Exception as error:
        fault.append(error)
