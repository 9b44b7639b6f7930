#include "exchange.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace emulator::hccl {
namespace {

uint64_t laid_out(const Leg& leg) { return 2 * leg.number - 1; }

bool has_not_laid_out(const Leg& leg, const Party& party) { return party.step < laid_out(leg); }

bool has_not_arrived(const Leg& leg, const Party& party) {
  return party.stops[leg.number % kStops].number < leg.number;
}

template <class Test>
bool any_party(const std::vector<Leg>& legs, Test test) {
  for (const Leg& leg : legs) {
    for (size_t party = 0; party < leg.channel.ranks.size(); ++party) {
      if (test(leg, leg.channel.parties[party])) return true;
    }
  }
  return false;
}

std::string whereabouts(const Leg& leg, const Party& party) {
  if (party.called >= leg.number) return "which has called it, but its stream is held up by something before it";
  if (party.called == 0) return "which has not called it, nor anything before it";
  return "which has not called it; its last call was operation " + std::to_string(party.called) + ", " +
         in_words(party.last_kind, party.last_count, party.last_dtype);
}

std::string in_words(const Leg& leg) {
  std::string text = in_words(leg.signature) + ", operation " + std::to_string(leg.number);
  if (leg.signature.kind == Kind::transfer) {
    const auto& [from, to] = std::pair(leg.channel.ranks[0], leg.channel.ranks[1]);
    text += " from rank " + std::to_string(from) + " to rank " + std::to_string(to);
  }
  return text + ", as seen by rank " + std::to_string(leg.channel.ranks[leg.party]);
}

}  // namespace

Exchange::Exchange(std::shared_ptr<Board> board, std::vector<Leg> legs, std::chrono::seconds patience)
    : board_(std::move(board)), legs_(std::move(legs)), patience_(patience) {}

void Exchange::lay_out() {
  throw_if_failed();
  for (const Leg& leg : legs_) {
    char* place = leg.channel.tray(leg.party, leg.number);
    for (const Range& range : leg.gives) {
      if (!computes()) break;  // in a dry run there are no bytes
      std::memcpy(place, range.begin, range.nbytes);
      place += range.nbytes;
    }
    Party& mine = leg.channel.parties[leg.party];
    mine.signatures[leg.number % kTrays] = leg.signature;
    mine.step = laid_out(leg);
  }
  board_->changed();
}

void Exchange::take() {
  throw_if_failed();
  for (const Leg& leg : legs_) {
    const Trays trays(leg.channel, leg.number);
    try {
      check_agreement(leg);
      if (leg.take && computes()) leg.take(trays);
    } catch (const std::exception& error) {
      board_->fail(error.what());
      throw_if_failed();
      throw;  // another rank fails just now, and its words are not all there yet
    }
    leg.channel.parties[leg.party].step = laid_out(leg) + 1;
    // Nobody begins to fill these trays anew before this rank has laid out once more.
    if (any_party({leg}, [](const Leg& each, const Party& party) { return party.step <= laid_out(each); })) continue;
    for (size_t party = 0; party < trays.parties(); ++party) {
      Board::clear(leg.channel.tray(party, leg.number), trays.signature(party).given);
    }
  }
}

void Exchange::check_agreement(const Leg& leg) const {
  for (size_t party = 0; party < leg.channel.ranks.size(); ++party) {
    const Signature& theirs = leg.channel.parties[party].signatures[leg.number % kTrays];
    if (agree(leg.signature, theirs)) continue;
    throw std::runtime_error(in_words(leg) + ", meets " + in_words(theirs) + " on " +
                             board_->name_of(leg.channel.ranks[party]) +
                             ": all ranks must call the same, in the same order, with the same sizes and types");
  }
}

bool Exchange::ready() { return board_->has_failed() || !any_party(legs_, has_not_laid_out); }

void Exchange::demand() {
  for (const Leg& leg : legs_) {
    for (size_t party = 0; party < leg.channel.ranks.size(); ++party) {
      if (party == leg.party) continue;
      std::atomic<uint64_t>& wanted = leg.channel.parties[party].wanted;
      uint64_t known = wanted;
      while (known < laid_out(leg) && !wanted.compare_exchange_weak(known, laid_out(leg))) {
      }
      if (known < laid_out(leg)) board_->changed();
    }
  }
  give_up_on(has_not_laid_out);
}

void Exchange::wait() {
  for (;;) {
    const uint32_t before = board_->changes();
    if (ready()) return;
    demand();
    board_->sleep(before);
  }
}

void Exchange::abandon() { give_up_on(legs_.front(), legs_.front().party, "the device is lost"); }

void Exchange::arrives(Nanoseconds time, Nanoseconds lasts, const LinkUse& link) {
  for (const Leg& leg : legs_) {
    Stop& stop = leg.channel.parties[leg.party].stops[leg.number % kStops];
    stop.arrives = time;
    stop.lasts = lasts;
    stop.link = link;
    stop.number = leg.number;
  }
  board_->changed();
}

std::optional<Nanoseconds> Exchange::ends() {
  std::lock_guard lock(mutex_);
  if (ends_) return ends_;
  if (board_->has_failed()) return 0;
  if (any_party(legs_, has_not_arrived)) return std::nullopt;
  Nanoseconds end = 0;
  std::vector<LinkUse> links;
  for (const Leg& leg : legs_) {
    Nanoseconds all_are_there = 0, lasts = 0;
    for (size_t party = 0; party < leg.channel.ranks.size(); ++party) {
      const Stop& stop = leg.channel.parties[party].stops[leg.number % kStops];
      all_are_there = std::max(all_are_there, stop.arrives);
      lasts = std::max(lasts, stop.lasts);
      links.push_back(stop.link);
      if (stop.number == leg.number) continue;
      board_->fail(in_words(leg) + ": " + board_->name_of(leg.channel.ranks[party]) + " is more than " +
                  std::to_string(kStops) + " operations ahead in modelled time");
      return 0;
    }
    end = std::max(end, all_are_there + lasts);
  }
  links_ = std::move(links);
  return ends_ = end;
}

std::vector<LinkUse> Exchange::links() {
  std::lock_guard lock(mutex_);
  return links_;
}

void Exchange::wait_for_end() {
  for (;;) {
    const uint32_t before = board_->changes();
    if (ends()) return;
    give_up_on(has_not_arrived);
    board_->sleep(before);
  }
}

void Exchange::give_up_on(Test is_missing) {
  std::lock_guard lock(mutex_);
  if (!waited_since_) waited_since_ = Clock::now();
  const bool too_long = Clock::now() > *waited_since_ + patience_;
  for (const Leg& leg : legs_) {
    for (size_t party = 0; party < leg.channel.ranks.size(); ++party) {
      if (!is_missing(leg, leg.channel.parties[party])) continue;
      const uint32_t rank = leg.channel.ranks[party];
      // Each look is later than what it corrects: a rank leaves before it is gone, and may have done its part first.
      const bool is_gone = board_->is_gone(rank), has_left = board_->has_left(rank);
      if (!is_missing(leg, leg.channel.parties[party])) continue;
      if (has_left) give_up_on(leg, party, "has destroyed the communicator");
      if (is_gone) give_up_on(leg, party, "is gone");
      if (too_long) {
        give_up_on(leg, party,
                   "was waited for " + std::to_string(patience_.count()) + " s (HCCL_EXEC_TIMEOUT), " +
                       whereabouts(leg, leg.channel.parties[party]));
      }
    }
  }
}

void Exchange::give_up_on(const Leg& leg, size_t party, const std::string& why) {
  board_->fail(in_words(leg) + ": " + board_->name_of(leg.channel.ranks[party]) + " " + why);
}

void Exchange::throw_if_failed() const {
  if (board_->has_failed()) throw std::runtime_error(board_->failure());
}

}  // namespace emulator::hccl
