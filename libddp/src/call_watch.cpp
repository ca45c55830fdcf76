#include "call_watch.h"

#include <fmt/format.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <sstream>
#include <thread>
#include <utility>

namespace ddp::detail {
namespace {

using std::chrono::milliseconds;
using Clock = CallWatch::Clock;
using Lock = std::unique_lock<std::mutex>;

constexpr milliseconds kTick(100);
// How long a call may take before it is suspicious. Ranks often wait for each other so long; then it costs two or three
// messages to the store.
constexpr milliseconds kPatience(300);
// How often the store is asked about one that stays: at first each tick, at last at this pace.
constexpr milliseconds kSlowest(2000);
// How long the others are given to hear a verdict, because the store may end with this rank.
constexpr milliseconds kHearing(1000);
constexpr size_t kRemembered = 256;  // calls

constexpr size_t kSaid = 8;  // of the oldest and of the newest calls on their way

constexpr const char* kVerdict = "verdict";  // a key in the store
std::string waits_key(int rank) { return fmt::format("waits/{}", rank); }
std::string heard_key(int rank) { return fmt::format("heard/{}", rank); }

}  // namespace

struct CallWatch::State {
  State(c10::intrusive_ptr<c10d::Store> s, Place p) : store(std::move(s)), place(p) {}

  c10::intrusive_ptr<c10d::Store> store;  // guarded by asking
  const Place place;
  std::timed_mutex asking;
  bool own_store = false;

  mutable std::mutex mutex;
  std::condition_variable changed;
  bool running = false, stop = false, asleep = false;
  std::thread::id thread;
  std::deque<std::weak_ptr<Pending>> calls;
  std::vector<Signature> history = std::vector<Signature>(kRemembered);  // by number
  uint64_t begun = 0;
  std::string verdict;

  void run();
  void look(std::vector<uint64_t> numbers);
  std::string compare();
  void announce(const std::string& why);
  c10d::Store& own();
  void tell(Lock& lock);
  std::vector<std::shared_ptr<Pending>> open_calls();
  std::string numbers_and_signatures(std::vector<uint64_t> numbers);
  Signature remembered(uint64_t number) const { return history[number % kRemembered]; }
};

// Those on their way, oldest first; forgets the others.
std::vector<std::shared_ptr<CallWatch::Pending>> CallWatch::State::open_calls() {
  std::vector<std::shared_ptr<Pending>> open;
  std::erase_if(calls, [&](const std::weak_ptr<Pending>& weak) {
    auto call = weak.lock();
    if (call == nullptr || call->done.load(std::memory_order_relaxed)) return true;
    open.push_back(std::move(call));
    return false;
  });
  return open;
}

void CallWatch::State::run() {
  Lock lock(mutex);
  auto used = Clock::now(), next_look = used;
  while (!stop) {
    const auto now = Clock::now();
    const auto open = open_calls();
    if (open.empty()) {
      // Awake for a while: to be woken costs more than to look ten times a second.
      if (now - used < std::chrono::seconds(1)) {
        changed.wait_for(lock, kTick);
      } else {
        asleep = true;
        changed.wait(lock, [&] { return stop || !calls.empty(); });
        asleep = false;
        used = Clock::now();
      }
      continue;
    }
    used = now;
    if (!verdict.empty()) {
      tell(lock);
      changed.wait_for(lock, kTick);
      continue;
    }
    const auto age = now - open.front()->since;
    if (age < kPatience || now < next_look) {
      changed.wait_for(lock, kTick);
      continue;
    }
    std::vector<uint64_t> numbers;
    for (const auto& call : open) numbers.push_back(call->number);
    lock.unlock();
    look(std::move(numbers));
    lock.lock();
    next_look = Clock::now() + std::clamp(std::chrono::duration_cast<milliseconds>(age) / 8, kTick, kSlowest);
  }
  running = false;
  changed.notify_all();
}

// Calls what waits for the verdict.
void CallWatch::State::tell(Lock& lock) {
  std::vector<std::function<void()>> due;
  for (const auto& call : open_calls()) {
    for (auto& f : call->on_verdict) due.push_back(std::move(f));
    call->on_verdict.clear();
  }
  lock.unlock();
  for (const auto& f : due) f();
  due.clear();  // may hold the last of what this thread works for
  lock.lock();
}

// A connection of its own: others may wait in the first one for minutes. Called with `asking` locked.
c10d::Store& CallWatch::State::own() {
  if (!own_store) {
    store = store->clone();
    store->setTimeout(std::chrono::seconds(2));
    own_store = true;
  }
  return *store;
}

// A line for each of these calls: number, hash of the signature, and in words.
std::string CallWatch::State::numbers_and_signatures(std::vector<uint64_t> numbers) {
  if (numbers.size() > 2 * kSaid) numbers.erase(numbers.begin() + kSaid, numbers.end() - kSaid);
  std::string lines;
  Lock lock(mutex);
  for (const uint64_t number : numbers) {
    if (number == 0 || number > begun || number + kRemembered <= begun) continue;
    const Signature signature = remembered(number);
    lines += fmt::format("{} {} {}\n", number, hash_of(signature, number), describe(signature, number));
  }
  return lines;
}

// Tells the store in which calls this rank waits, and compares with what others say.
void CallWatch::State::look(std::vector<uint64_t> numbers) {
  std::unique_lock ask(asking, kHearing);
  if (!ask.owns_lock()) return;
  const std::string said = numbers_and_signatures(std::move(numbers));
  if (said.empty()) return;
  try {
    own().set(waits_key(place.rank), said);
    const std::string found = compare();
    if (!found.empty()) announce(found);
  } catch (const std::exception&) {  // the store is gone: the calls will fail by themselves
  }
}

// With the ranks at distances 1, 2, 4, ...: a difference lies between some two of them, and who finds it tells all.
std::string CallWatch::State::compare() {
  if (store->check({std::string(kVerdict)})) return store->get_to_str(kVerdict);
  for (int distance = 1; distance < place.size; distance *= 2) {
    const int other = (place.rank + distance) % place.size;
    if (!store->check({waits_key(other)})) continue;
    std::istringstream said(store->get_to_str(waits_key(other)));
    uint64_t number = 0, hash = 0;
    std::string words;
    while (said >> number >> hash && std::getline(said >> std::ws, words)) {
      Signature mine;
      {
        Lock lock(mutex);
        if (number > begun || number + kRemembered <= begun) continue;
        mine = remembered(number);
      }
      if (hash == hash_of(mine, number)) continue;
      std::string first = fmt::format("rank {} calls {}", place.rank, describe(mine, number));
      std::string second = fmt::format("rank {} calls {}", other, words);
      if (other < place.rank) std::swap(first, second);
      return store->compareSet(
          kVerdict, "",
          fmt::format("ranks disagree: {}, {}; make the same calls with the same sizes in the same order on all ranks",
                      first, second));
    }
  }
  return "";
}

// Once all have heard of the verdict, or long enough.
void CallWatch::State::announce(const std::string& why) {
  try {
    store->set(heard_key(place.rank), "1");
    std::vector<std::string> keys;
    for (int rank = 0; rank < place.size; ++rank) keys.push_back(heard_key(rank));
    const auto deadline = Clock::now() + kHearing;
    while (!store->check(keys) && Clock::now() < deadline) std::this_thread::sleep_for(milliseconds(20));
  } catch (const std::exception&) {  // who served the store has heard
  }
  Lock lock(mutex);
  if (verdict.empty()) verdict = why;
  changed.notify_all();
}

CallWatch::CallWatch(c10::intrusive_ptr<c10d::Store> store, Place place)
    : state_(std::make_shared<State>(std::move(store), place)) {}

CallWatch::~CallWatch() {
  Lock lock(state_->mutex);
  state_->stop = true;
  state_->changed.notify_all();
  if (state_->thread == std::this_thread::get_id()) return;
  // The thread keeps the state alive: where the store does not answer it is left behind.
  state_->changed.wait_for(lock, std::chrono::seconds(1), [&] { return !state_->running; });
}

std::shared_ptr<CallWatch::Pending> CallWatch::begin(uint64_t number, const Signature& signature) {
  auto call = std::make_shared<Pending>();
  call->number = number;
  call->since = Clock::now();
  Lock lock(state_->mutex);
  state_->begun = number;
  state_->history[number % kRemembered] = signature;
  state_->calls.push_back(call);
  if (!state_->running && !state_->stop) {
    state_->running = true;
    std::thread thread([state = state_] { state->run(); });
    state_->thread = thread.get_id();
    thread.detach();
  }
  if (state_->asleep) state_->changed.notify_all();
  return call;
}

std::string CallWatch::verdict() const {
  Lock lock(state_->mutex);
  return state_->verdict;
}

void CallWatch::on_verdict(const std::shared_ptr<Pending>& call, std::function<void()> f) {
  {
    Lock lock(state_->mutex);
    if (state_->verdict.empty()) {
      call->on_verdict.push_back(std::move(f));
      return;
    }
  }
  f();
}

std::string CallWatch::ask(uint64_t number) {
  if (verdict().empty()) state_->look({number});
  return verdict();
}

void CallWatch::accuse(const std::string& why) {
  std::unique_lock ask(state_->asking, kHearing);
  if (!ask.owns_lock()) return;
  std::string winner = why;
  try {
    winner = state_->own().compareSet(kVerdict, "", why);
  } catch (const std::exception&) {  // the store is gone, and the others with it
  }
  state_->announce(winner);
}

}  // namespace ddp::detail
