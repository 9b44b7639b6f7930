// The modelled drives, for the Python package: what hands operations to one, and asks when they end.
#include "operation.h"
#include "simulation.h"

using namespace emulator;

namespace {

// What an operation's handle points to.
using Held = std::shared_ptr<Simulation::Lane>;

Simulation::Lane& lane_of(void* operation) { return **static_cast<Held*>(operation); }

}  // namespace

ACL_EXPORT int ascend_emulator_has_drive() { return Simulation::on() && Simulation::get().has_drive(); }

ACL_EXPORT void* ascend_emulator_drive_submit(int drive, int reads, size_t nbytes) {
  return new Held(Simulation::get().use_drive(drive, reads != 0, nbytes));
}

ACL_EXPORT int ascend_emulator_drive_done(void* operation) { return Simulation::get().asked(lane_of(operation)); }

ACL_EXPORT int ascend_emulator_drive_cancel(void* operation) { return Simulation::get().cancel(lane_of(operation)); }

// At most so many nanoseconds; below 0: until the end. Whether it has ended.
ACL_EXPORT int ascend_emulator_drive_wait(void* operation, int64_t at_most) {
  if (at_most >= 0) return Simulation::get().wait_for(lane_of(operation), at_most);
  Simulation::get().wait_for(lane_of(operation));
  return 1;
}

ACL_EXPORT void ascend_emulator_drive_times(void* operation, int64_t* began, int64_t* ended) {
  std::tie(*began, *ended) = Simulation::get().times_of(lane_of(operation));
}

// Nobody asks any more. The drive goes on with it.
ACL_EXPORT void ascend_emulator_drive_forget(void* operation) { delete static_cast<Held*>(operation); }
