// Device memory and pinned host memory: which addresses are which, and how much of each device is taken.
#pragma once

#include "operation.h"

#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <utility>
#include <vector>

namespace emulator {

enum class Place { device, pinned, pageable, freed };

class Memory {
 public:
  static Memory& get();

  aclError allocate_device(void** pointer, size_t nbytes);
  aclError free_device(void* pointer);
  aclError allocate_host(void** pointer, size_t nbytes);
  aclError free_host(void* pointer);
  aclError register_host(void* pointer, size_t nbytes, bool mapped);
  aclError unregister_host(void* pointer);

  // Makes host memory zero. Whole pages of aclrtMallocHost then take no room.
  void blank(void* pointer, size_t nbytes);

  Place place_of(const void* pointer);
  std::optional<int> device_of(const void* pointer);  // nothing for what is not device memory
  std::pair<size_t, size_t> free_and_total();

  // Device memory that counts as used, and has no address.
  bool take(int device, size_t nbytes);
  void give(int device, size_t nbytes);

 private:
  struct Extent {
    size_t nbytes;
    int device;  // kNone for host memory
    bool owned;  // mapped by us, not registered by the user
  };
  using Extents = std::map<uintptr_t, Extent>;
  static constexpr int kNone = -1;

  // The extent that the address lies in; null where there is none.
  static const Extent* at(const Extents& extents, const void* pointer);
  aclError refuse_beyond_host_limit(const char* function, size_t nbytes);
  void bury(void* pointer, size_t nbytes);
  void seal_idle_graves();

  std::mutex mutex_;
  Extents device_;
  Extents host_;
  std::set<uintptr_t> mapped_;  // parts of host_ that the device is shown besides; they are pinned without
  std::map<int, size_t> device_used_;
  size_t host_used_ = 0;
  Extents graves_;  // freed: nobody gets these addresses again soon
  std::vector<uintptr_t> open_;   // of these, the ones that queued work may still touch
  std::deque<uintptr_t> sealed_;  // and those that nothing can, in the order of their freeing
};

}  // namespace emulator
