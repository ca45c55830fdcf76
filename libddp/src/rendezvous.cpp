#include "rendezvous.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <future>
#include <memory>
#include <optional>
#include <random>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "ddp/error.h"
#include "error_text.h"

namespace ddp::detail {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr const char* kPrefix = "libddp/meet/";

std::string endpoint(const Env& env) { return fmt::format("{}:{}", env.master_addr, env.master_port); }

std::string who(const Place& place) { return fmt::format("[ddp::ProcessGroup] {}", place.name()); }

// A name that cannot be resolved is retried by TCPStore until the timeout, in silence: ask first, and give a name that
// has just been created (a pod, a container) a few seconds to appear.
void require_resolvable(const Env& env, milliseconds timeout) {
  const auto deadline = Clock::now() + std::min<milliseconds>(timeout, std::chrono::seconds(5));
  for (;;) {
    addrinfo* found = nullptr;
    const int error = getaddrinfo(env.master_addr.c_str(), nullptr, nullptr, &found);
    if (found != nullptr) freeaddrinfo(found);
    if (error == 0) return;
    if (Clock::now() >= deadline) {
      throw ConfigError(fmt::format("{}: the host of the store, {}, cannot be resolved ({}); check MASTER_ADDR",
                                    who(env.place()), endpoint(env), gai_strerror(error)));
    }
    std::this_thread::sleep_for(milliseconds(200));
  }
}

// The listening socket is made here and handed over, since a busy port inside TCPStore ends the process.
int listen_on(const Env& env) {
  for (const int family : {AF_INET6, AF_INET}) {
    const int fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) continue;
    const int on = 1, off = 0;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    sockaddr_storage address{};
    socklen_t length = 0;
    if (family == AF_INET6) {
      setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
      auto* six = reinterpret_cast<sockaddr_in6*>(&address);
      six->sin6_family = AF_INET6;
      six->sin6_port = htons(env.master_port);
      length = sizeof *six;
    } else {
      auto* four = reinterpret_cast<sockaddr_in*>(&address);
      four->sin_family = AF_INET;
      four->sin_port = htons(env.master_port);
      length = sizeof *four;
    }
    if (bind(fd, reinterpret_cast<sockaddr*>(&address), length) == 0 && listen(fd, SOMAXCONN) == 0) return fd;
    const int error = errno;
    close(fd);
    if (family == AF_INET6 && error != EADDRINUSE) continue;  // a host without IPv6
    throw ConfigError(
        fmt::format("{}: the store cannot listen on {}: {}; another job may use the port: set MASTER_PORT "
                    "to a free one",
                    who(env.place()), endpoint(env), std::strerror(error)));
  }
  throw ConfigError(fmt::format("{}: the store cannot listen on {}: no IPv4 or IPv6 socket can be made",
                                who(env.place()), endpoint(env)));
}

std::string make_nonce() {
  std::random_device random;
  const auto part = [&] { return static_cast<uint64_t>(random()) << 32 | random(); };
  return fmt::format("{:016x}{:016x}", part(), part());
}

std::optional<std::string> read(c10d::Store& store, const std::string& key) {
  if (!store.check({key})) return std::nullopt;
  return store.get_to_str(key);
}

// What a rank says of itself. `nonce` tells this life from an earlier one.
struct Hello {
  std::string nonce;
  int world = 0;
  std::string traits;

  std::string text() const { return fmt::format("{} {} {}", nonce, world, traits); }

  static Hello parse(const std::string& text) {
    Hello hello;
    std::istringstream in(text);
    in >> hello.nonce >> hello.world >> std::ws;
    std::getline(in, hello.traits);
    return hello;
  }
};

// Rank 0's answer: which lives it has seen, under a name of its own.
struct Answer {
  std::string name;
  std::vector<std::pair<int, Hello>> seen;

  std::string text() const {
    std::string text = name;
    for (const auto& [rank, hello] : seen) text += fmt::format("\n{} {}", rank, hello.text());
    return text;
  }

  static Answer parse(const std::string& text) {
    Answer answer;
    std::istringstream in(text);
    std::getline(in, answer.name);
    for (std::string line; std::getline(in, line);) {
      const auto space = line.find(' ');
      answer.seen.emplace_back(std::stoi(line.substr(0, space)), Hello::parse(line.substr(space + 1)));
    }
    return answer;
  }

  const Hello* of(int rank) const {
    const auto it = std::find_if(seen.begin(), seen.end(), [&](const auto& entry) { return entry.first == rank; });
    return it == seen.end() ? nullptr : &it->second;
  }

  // The first rank that does not agree with rank 0.
  std::optional<int> odd_one() const {
    for (const auto& [rank, hello] : seen) {
      if (hello.world != seen.front().second.world || hello.traits != seen.front().second.traits) return rank;
    }
    return std::nullopt;
  }
};

class Meeting {
 public:
  Meeting(c10d::Store& store, const Place& place, const std::string& traits, milliseconds timeout)
      : store_(store),
        place_(place),
        hello_{.nonce = make_nonce(), .world = place.size, .traits = traits},
        timeout_(timeout),
        deadline_(Clock::now() + timeout) {}

  std::string run() {
    store_.set(key("rank", place_.rank), hello_.text());
    return place_.rank == 0 ? lead() : follow();
  }

 private:
  std::string lead() {
    std::string posted, name;
    for (milliseconds pause(1);; pause = wait(pause)) {
      Answer answer{.name = {}, .seen = {{0, hello_}}};
      for (int rank = 1; rank < place_.size; ++rank) {
        if (const auto text = read(store_, key("rank", rank))) answer.seen.emplace_back(rank, Hello::parse(*text));
      }
      const auto odd = answer.odd_one();
      if (!odd && std::ssize(answer.seen) < place_.size) continue;
      // A changed set of lives is a new answer with a new name.
      std::string lives;
      for (const auto& [rank, hello] : answer.seen) lives += hello.nonce;
      if (lives != posted) {
        posted = lives, name = make_nonce();
        answer.name = name;
        store_.set(key("answer"), answer.text());
      }
      if (odd) {
        if (read(store_, key("ack", *odd)) == name) throw_mismatch(answer, *odd);  // it lives, it is no stale key
        continue;
      }
      bool all = true;
      for (int rank = 1; rank < place_.size; ++rank) all = all && read(store_, key("ack", rank)) == name;
      if (!all) continue;
      store_.set(key("go"), name);
      return name;
    }
  }

  std::string follow() {
    std::string acknowledged;
    for (milliseconds pause(1);; pause = wait(pause)) {
      if (!acknowledged.empty() && read(store_, key("go")) == acknowledged) return acknowledged;
      const auto text = read(store_, key("answer"));
      if (!text) continue;
      const Answer answer = Answer::parse(*text);
      const Hello* mine = answer.of(place_.rank);
      if (mine == nullptr || mine->nonce != hello_.nonce || answer.name == acknowledged) continue;
      store_.set(key("ack", place_.rank), answer.name);
      acknowledged = answer.name;
      if (answer.odd_one() == place_.rank) throw_mismatch(answer, place_.rank);
    }
  }

  [[noreturn]] void throw_mismatch(const Answer& answer, int odd) const {
    const Hello& zero = answer.seen.front().second;
    const Hello& other = *answer.of(odd);
    if (zero.world != other.world) {
      throw MismatchError(
          fmt::format("{}: rank 0 was told a world of {}, rank {} a world of {}; start all ranks with the "
                      "same WORLD_SIZE",
                      who(place_), zero.world, odd, other.world));
    }
    throw MismatchError(
        fmt::format("{}: rank 0 chose \"{}\", rank {} \"{}\" (device, backend); give all ranks the same "
                    "backend and the same kind of device",
                    who(place_), zero.traits, odd, other.traits));
  }

  milliseconds wait(milliseconds pause) const {
    if (Clock::now() >= deadline_) throw_timeout();
    std::this_thread::sleep_for(pause);
    return std::min(pause * 2, milliseconds(50));
  }

  [[noreturn]] void throw_timeout() const {
    std::vector<int> missing;
    for (int rank = 0; rank < place_.size; ++rank) {
      if (!store_.check({key("rank", rank)})) missing.push_back(rank);
    }
    // Every rank left a key, so some of the keys are an earlier life's.
    const std::string absent = missing.empty() ? std::string("unknown, an earlier life of each has been here")
                                               : fmt::format("rank {}", fmt::join(missing, ", "));
    throw TimeoutError(
        fmt::format("{}: waited {:.3g} s for all ranks to join: {} of {} joined, missing: {}; were all ranks "
                    "started, with the same MASTER_ADDR and MASTER_PORT?",
                    who(place_), std::chrono::duration<double>(timeout_).count(),
                    place_.size - std::max<size_t>(missing.size(), 1), place_.size, absent));
  }

  static std::string key(const std::string& name) { return kPrefix + name; }
  static std::string key(const std::string& name, int rank) { return fmt::format("{}{}/{}", kPrefix, name, rank); }

  c10d::Store& store_;
  const Place place_;
  const Hello hello_;
  const milliseconds timeout_;
  const Clock::time_point deadline_;
};

using StorePtr = c10::intrusive_ptr<c10d::Store>;

// TCPStore waits without limit for the first answer of whoever accepts the connection, and that may be no store: it is
// made on a thread that can be left alone.
StorePtr make_store(const Env& env, const c10d::TCPStoreOptions& options) {
  auto promise = std::make_shared<std::promise<StorePtr>>();
  auto store = promise->get_future();
  std::thread([promise, host = env.master_addr, options] {
    try {
      promise->set_value(c10::make_intrusive<c10d::TCPStore>(host, options));
    } catch (...) {
      promise->set_exception(std::current_exception());
    }
  }).detach();
  // It gives up by itself when nobody accepts.
  if (store.wait_for(options.timeout + std::chrono::seconds(1)) == std::future_status::ready) return store.get();
  throw std::runtime_error("somebody accepts connections and says nothing");
}

}  // namespace

c10::intrusive_ptr<c10d::Store> connect_store(const Env& env, milliseconds timeout) {
  require_resolvable(env, timeout);
  c10d::TCPStoreOptions options;
  options.port = env.master_port;
  options.isServer = env.rank == 0 && !env.agent_store;
  options.waitWorkers = false;  // `meet` waits, and says for whom
  options.timeout = timeout;
  if (options.isServer) options.masterListenFd = listen_on(env);
  try {
    return make_store(env, options);
  } catch (const std::exception& e) {
    throw TimeoutError(fmt::format("{}: no store answers at {} within {:.3g} s: {}; is rank 0 running there?",
                                   who(env.place()), endpoint(env), std::chrono::duration<double>(timeout).count(),
                                   error_text(e)));
  }
}

std::string meet(c10d::Store& store, const Place& place, const std::string& traits, milliseconds timeout) {
  try {
    return Meeting(store, place, traits, timeout).run();
  } catch (const Error&) {
    throw;
  } catch (const std::exception& e) {
    throw CommError(fmt::format("{}: ranks were joining when a call to the store failed: {}{}", who(place),
                                error_text(e), lost_store(store)));
  }
}

std::string lost_store(c10d::Store& store) {
  try {
    store.check({"libddp/alive"});
    return "";
  } catch (const std::exception&) {
    auto* prefixed = dynamic_cast<c10d::PrefixStore*>(&store);
    const auto inner = prefixed != nullptr ? prefixed->getUnderlyingNonPrefixStore() : nullptr;
    const auto* tcp = dynamic_cast<const c10d::TCPStore*>(inner ? inner.get() : &store);
    const std::string place = tcp != nullptr ? fmt::format(" at {}:{}", tcp->getHost(), tcp->getPort()) : "";
    return fmt::format(
        ": the store{} is lost, since the process that serves it, rank 0 or torchrun, has ended; look at "
        "its output and start all ranks again",
        place);
  }
}

}  // namespace ddp::detail
