"""A CUDA runtime that knows pinned host memory, and nothing else."""

from __future__ import annotations

import ctypes
from pathlib import Path

from tests.allocators.native import library

ALREADY_REGISTERED, NOT_REGISTERED = 712, 713
_SOURCE = """
#include <cstddef>
#include <cstdlib>
#include <map>

namespace {
std::map<char*, size_t> allocated, registered;
int next_code = 0, last_error = 0, shift = 0;

int end(int code) {
  if (next_code != 0) code = next_code;
  next_code = 0;
  if (code != 0) last_error = code;  // a call that succeeds does not clear it
  return code;
}
}  // namespace

extern "C" {
int cudaHostAlloc(void** pointer, size_t nbytes, unsigned flags) {
  if (flags != 1) return end(1);
  if (next_code != 0) return end(0);
  void* start;
  if (nbytes > (size_t{1} << 46) || posix_memalign(&start, 4096, nbytes + shift) != 0) return end(2);
  *pointer = static_cast<char*>(start) + shift;
  allocated[static_cast<char*>(*pointer)] = nbytes;
  return end(0);
}
int cudaFreeHost(void* pointer) {
  if (next_code != 0) return end(0);
  if (allocated.erase(static_cast<char*>(pointer)) == 0) return end(1);
  free(static_cast<char*>(pointer) - shift);
  return end(0);
}
int cudaHostRegister(void* pointer, size_t nbytes, unsigned flags) {
  if (flags != 1 || nbytes == 0) return end(1);
  if (next_code != 0) return end(0);
  return end(registered.insert({static_cast<char*>(pointer), nbytes}).second ? 0 : 712);
}
int cudaHostUnregister(void* pointer) {
  if (next_code != 0) return end(0);
  return end(registered.erase(static_cast<char*>(pointer)) == 1 ? 0 : 713);
}
const char* cudaGetErrorString(int code) {
  return code == 2 ? "out of memory" : code == 700 ? "an illegal memory access was encountered" : "something else";
}
int cudaGetLastError() {
  const int code = last_error;
  last_error = 0;
  return code;
}
int cudaPeekAtLastError() { return last_error; }

void fail_next(int code) { next_code = code; }
void shift_by(int bytes) { shift = bytes; }
size_t bytes_allocated() {
  size_t sum = 0;
  for (const auto& [start, nbytes] : allocated) sum += nbytes;
  return sum;
}
size_t bytes_registered() {
  size_t sum = 0;
  for (const auto& [start, nbytes] : registered) sum += nbytes;
  return sum;
}
}
"""


class Cudart:
    """The library at `path`, as a test looks into it."""

    def __init__(self, folder: Path, name: str = "libtestcudart.so") -> None:
        self.path = library(folder, name, _SOURCE)
        self._library = ctypes.CDLL(self.path)

    def fail_next(self, code: int) -> None:
        """The next call of it that may fail does, and does nothing."""
        self._library.fail_next(code)

    def shift_by(self, nbytes: int) -> None:
        """What it allocates from now on starts so far behind a page."""
        self._library.shift_by(nbytes)

    @property
    def last_error(self) -> int:
        """What the check after the next kernel launch would find."""
        code: int = self._library.cudaPeekAtLastError()
        return code

    @property
    def allocated(self) -> int:
        nbytes: int = self._library.bytes_allocated()
        return nbytes

    @property
    def registered(self) -> int:
        nbytes: int = self._library.bytes_registered()
        return nbytes

    # What torch.cuda.cudart() has of it, by the same names.

    def cudaHostRegister(self, ptr: int, nbytes: int, flags: int) -> int:
        code: int = self._library.cudaHostRegister(ctypes.c_void_p(ptr), ctypes.c_size_t(nbytes), flags)
        return code

    def cudaHostUnregister(self, ptr: int) -> int:
        code: int = self._library.cudaHostUnregister(ctypes.c_void_p(ptr))
        return code

    def cudaGetErrorString(self, code: int) -> str:
        self._library.cudaGetErrorString.restype = ctypes.c_char_p
        text: bytes = self._library.cudaGetErrorString(code)
        return text.decode()

    def cudaGetLastError(self) -> int:
        code: int = self._library.cudaGetLastError()
        return code
