// CANN's copies of many pairs by one call, between host and device. On a stream each pair is a copy of its own.
#include "copy.h"
#include "fault.h"
#include "memory.h"
#include "settings.h"

#include <algorithm>
#include <cstdint>
#include <string>

namespace emulator {
namespace {

bool is_on_device(const void* pointer) { return Memory::get().device_of(pointer).has_value(); }

bool was_freed(const void* pointer) { return Memory::get().place_of(pointer) == Place::freed; }

bool lies_at(const void* pointer, const aclrtMemLocation& told) {
  if (const auto device = Memory::get().device_of(pointer)) {
    return told.type == ACL_MEM_LOCATION_TYPE_DEVICE && told.id == static_cast<uint32_t>(*device);
  }
  return told.type == ACL_MEM_LOCATION_TYPE_HOST || told.type == ACL_MEM_LOCATION_TYPE_HOST_NUMA;
}

// The arguments of one call, by CANN's names.
struct Batch {
  const char* function;
  void** dsts;
  const size_t* dest_maxs;
  void** srcs;
  const size_t* sizes;
  size_t num_batches;
  const aclrtMemcpyBatchAttr* attrs;
  const size_t* attrs_indexes;
  size_t num_attrs;
  size_t* fail_index;

  aclError refuse(aclError code, const std::string& why) const {
    return fail(code, std::string(function) + ": " + why);
  }

  aclError refuse_pair(size_t i, const std::string& why) const {
    *fail_index = i;
    return refuse(ACL_ERROR_RT_PARAM_INVALID, "pair " + std::to_string(i) + ": " + why);
  }

  // What is wrong with the call as a whole; that is no pair's failure. The codes are those of CANN's two layers.
  aclError check() const {
    if (!dsts || !dest_maxs || !srcs || !sizes || !attrs || !attrs_indexes || !fail_index) {
      return refuse(ACL_ERROR_INVALID_PARAM, "an array is missing");
    }
    *fail_index = SIZE_MAX;
    if (num_batches == 0) return refuse(ACL_ERROR_INVALID_PARAM, "no pairs");
    for (size_t i = 0; i < num_batches; ++i) {
      if (sizes[i] <= dest_maxs[i]) continue;
      return refuse(ACL_ERROR_INVALID_PARAM, "pair " + std::to_string(i) + ": more bytes than the destination has");
    }
    for (size_t k = 0; k < num_attrs; ++k) {
      const auto& reserved = attrs[k].rsv;
      if (std::any_of(std::begin(reserved), std::end(reserved), [](uint8_t byte) { return byte != 0; })) {
        return refuse(ACL_ERROR_INVALID_PARAM, "reserved bytes of the attributes are not 0");
      }
    }
    if (num_attrs == 0 || num_attrs > num_batches || attrs_indexes[0] != 0) {
      return refuse(ACL_ERROR_RT_PARAM_INVALID, "needs 1 attribute or more, at most one a pair, the first for pair 0");
    }
    for (size_t k = 1; k < num_attrs; ++k) {
      if (attrs_indexes[k] > attrs_indexes[k - 1] && attrs_indexes[k] < num_batches) continue;
      return refuse(ACL_ERROR_RT_PARAM_INVALID, "attrsIndexes must rise, and stay below the number of pairs");
    }
    return ACL_SUCCESS;
  }

  aclError check_pair(size_t i) const {
    const void* to = dsts[i];
    const void* from = srcs[i];
    if (to == nullptr || from == nullptr) return refuse_pair(i, "an address is missing");
    if (sizes[i] == 0) return refuse_pair(i, "0 bytes");
    if (was_freed(to) || was_freed(from)) return refuse_pair(i, "memory that was freed");
    const size_t* behind = std::upper_bound(attrs_indexes, attrs_indexes + num_attrs, i);
    const aclrtMemcpyBatchAttr& attr = attrs[behind - attrs_indexes - 1];
    if (!lies_at(to, attr.dstLoc)) return refuse_pair(i, "the destination is not where its attributes say");
    if (!lies_at(from, attr.srcLoc)) return refuse_pair(i, "the source is not where its attributes say");
    if (is_on_device(to) == is_on_device(from)) return refuse_pair(i, "neither from host to device nor back");
    if (is_on_device(to) != is_on_device(dsts[0])) return refuse_pair(i, "another direction than the first");
    return ACL_SUCCESS;
  }
};

aclError memcpy_batch_async(void** dsts, size_t* dest_maxs, void** srcs, size_t* sizes, size_t num_batches,
                            aclrtMemcpyBatchAttr* attrs, size_t* attrs_indexes, size_t num_attrs, size_t* fail_index,
                            aclrtStream stream) {
  const char* function = "aclrtMemcpyBatchAsync";
  if (const aclError code = fault(function); code != ACL_SUCCESS) return code;
  const Batch batch{function, dsts, dest_maxs, srcs, sizes, num_batches, attrs, attrs_indexes, num_attrs, fail_index};
  if (const aclError code = batch.check(); code != ACL_SUCCESS) return code;
  // As CANN does it: the pairs before one that is refused are on their way.
  for (size_t i = 0; i < num_batches; ++i) {
    if (const aclError code = batch.check_pair(i); code != ACL_SUCCESS) return code;
    const aclError code = copy_on_stream(function, dsts[i], dest_maxs[i], srcs[i], sizes[i], stream, i == 0);
    if (code != ACL_SUCCESS) return code;
  }
  return ACL_SUCCESS;
}

// An older CANN has no such function: dlsym, which asks this for its address, then finds none. (It leaves no message,
// and older Pythons' ctypes need one: they die if asked for the function there.)
extern "C" {
static auto* memcpy_batch_async_of_this_stack() {
  return settings().current_stack ? &memcpy_batch_async : nullptr;
}
}

}  // namespace
}  // namespace emulator

using namespace emulator;

ACL_EXPORT decltype(memcpy_batch_async) aclrtMemcpyBatchAsync
    __attribute__((ifunc("memcpy_batch_async_of_this_stack")));

ACL_EXPORT aclError aclrtMemcpyBatch(void** dsts, size_t* dest_maxs, void** srcs, size_t* sizes, size_t num_batches,
                                     aclrtMemcpyBatchAttr* attrs, size_t* attrs_indexes, size_t num_attrs,
                                     size_t* fail_index) {
  const char* function = "aclrtMemcpyBatch";
  if (const aclError code = fault(function); code != ACL_SUCCESS) return code;
  const Batch batch{function, dsts, dest_maxs, srcs, sizes, num_batches, attrs, attrs_indexes, num_attrs, fail_index};
  if (const aclError code = batch.check(); code != ACL_SUCCESS) return code;
  constexpr size_t most = 4096;
  if (num_batches > most) return batch.refuse(ACL_ERROR_RT_PARAM_INVALID, "more than 4096 pairs");
  for (size_t i = 0; i < num_batches; ++i) {
    if (const aclError code = batch.check_pair(i); code != ACL_SUCCESS) return code;
  }
  for (size_t i = 0; i < num_batches; ++i) {
    const aclError code = copy_now(function, dsts[i], dest_maxs[i], srcs[i], sizes[i], i == 0);
    if (code != ACL_SUCCESS) return code;
  }
  return ACL_SUCCESS;
}
