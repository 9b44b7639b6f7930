// The devices: which one a thread uses.
#pragma once

namespace emulator {

int current_device();

}  // namespace emulator
