#include "attendant.h"

namespace emulator::hccl {

Attendant::Attendant(Board& board) : board_(board) {
  if (!runs_unasked() || models_time()) thread_ = std::thread([this] { run(); });
}

Attendant::~Attendant() {
  closing_ = true;
  board_.changed();
  if (thread_.joinable()) thread_.join();
}

void Attendant::promise(const Party& party, uint64_t step, std::shared_ptr<StreamPoint> point) {
  if (runs_unasked()) return;
  {
    std::lock_guard lock(mutex_);
    promises_.push_back({&party, step, std::move(point)});
  }
  if (party.wanted >= step) board_.changed();
}

void Attendant::run() {
  while (!closing_) {
    const uint32_t before = board_.changes();
    for (const auto& point : due()) ask_for(*point);
    go_on_modelling();
    if (!closing_) board_.sleep(before);
  }
}

std::deque<std::shared_ptr<StreamPoint>> Attendant::due() {
  std::lock_guard lock(mutex_);
  std::erase_if(promises_, [](const Promise& each) { return is_reached(*each.point); });
  std::deque<std::shared_ptr<StreamPoint>> points;
  for (const Promise& each : promises_) {
    if (each.party->wanted >= each.step) points.push_back(each.point);
  }
  return points;
}

}  // namespace emulator::hccl
