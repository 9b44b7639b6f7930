#include "peers.h"

#include "captures.h"
#include "device.h"
#include "fault.h"
#include "memory.h"
#include "schedule.h"
#include "settings.h"
#include "simulation.h"

namespace emulator {

bool runs_unasked() { return settings().schedule == Order::eager; }

bool is_in_capture(aclrtStream stream) { return is_captured(stream); }

void ask_for(StreamPoint& point) { point.ask(); }

void finish(StreamPoint& point) { point.wait(); }

bool is_reached(StreamPoint& point) { return point.reached(); }

void go_on_modelling() {
  if (Simulation::on()) Simulation::get().go_on();
}

bool take_device_memory(size_t nbytes) { return Memory::get().take(current_device(), nbytes); }

void give_device_memory(int device, size_t nbytes) { Memory::get().give(device, nbytes); }

std::string free_device_memory() {
  const auto [free, total] = Memory::get().free_and_total();
  return std::to_string(free >> 20) + " of " + std::to_string(total >> 20) + " MiB";
}

int told_to_fail(const char* function) { return fault_without_device(function); }

}  // namespace emulator
