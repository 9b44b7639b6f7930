// Device memory and pinned host memory: which addresses are which, and how much of the device is taken.
#pragma once

#include "operation.h"

#include <map>
#include <mutex>
#include <utility>

namespace emulator {

enum class Place { device, pinned, pageable };

class Memory {
 public:
  static Memory& get();

  aclError allocate_device(void** pointer, size_t nbytes);
  aclError free_device(void* pointer);
  aclError allocate_host(void** pointer, size_t nbytes);
  aclError free_host(void* pointer);
  aclError register_host(void* pointer, size_t nbytes);
  aclError unregister_host(void* pointer);

  Place place_of(const void* pointer);
  std::pair<size_t, size_t> free_and_total();

 private:
  struct Extent {
    size_t nbytes;
    bool owned;  // mapped by us, not registered by the user
  };
  using Extents = std::map<uintptr_t, Extent>;

  static bool covers(const Extents& extents, const void* pointer);
  void bury(void* pointer, size_t nbytes);

  std::mutex mutex_;
  Extents device_;
  Extents host_;
  size_t device_used_ = 0;
  std::vector<std::pair<void*, size_t>> buried_;
};

}  // namespace emulator
