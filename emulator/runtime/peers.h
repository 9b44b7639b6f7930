// What libhccl.so needs of the runtime, beside streams to put its operations on.
#pragma once

#include "stream_point.h"
#include "operation.h"

#include <string>

#define FOR_HCCL __attribute__((visibility("default")))

namespace emulator {

// Whether streams run what they have without being asked, as the eager schedule has it.
FOR_HCCL bool runs_unasked();

// Whether what is put on the stream goes into a graph.
FOR_HCCL bool is_in_capture(aclrtStream stream);

// Makes the schedule run the stream up to this point.
FOR_HCCL void ask_for(StreamPoint& point);
FOR_HCCL bool is_reached(StreamPoint& point);
FOR_HCCL void finish(StreamPoint& point);  // and waits until that is done

// Works out modelled time as far as it can be by now. Does nothing where time is not modelled.
FOR_HCCL void go_on_modelling();

// Takes memory of the current device that nobody will touch; false if there is not as much.
FOR_HCCL bool take_device_memory(size_t nbytes);
FOR_HCCL void give_device_memory(int device, size_t nbytes);
FOR_HCCL std::string free_device_memory();  // in words

// 0, or what a call that was told to fail is to return; its message is kept already.
FOR_HCCL int told_to_fail(const char* function);

}  // namespace emulator
