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

void Attendant::promise(const Party& party, uint64_t step, std::shared_ptr<Mark> mark) {
  if (runs_unasked()) return;
  {
    std::lock_guard lock(mutex_);
    promises_.push_back({&party, step, std::move(mark)});
  }
  if (party.wanted >= step) board_.changed();
}

void Attendant::run() {
  while (!closing_) {
    const uint32_t before = board_.changes();
    for (const auto& mark : due()) ask_for(*mark);
    go_on_modelling();
    if (!closing_) board_.sleep(before);
  }
}

std::deque<std::shared_ptr<Mark>> Attendant::due() {
  std::lock_guard lock(mutex_);
  std::erase_if(promises_, [](const Promise& each) { return is_reached(*each.mark); });
  std::deque<std::shared_ptr<Mark>> marks;
  for (const Promise& each : promises_) {
    if (each.party->wanted >= each.step) marks.push_back(each.mark);
  }
  return marks;
}

}  // namespace emulator::hccl
