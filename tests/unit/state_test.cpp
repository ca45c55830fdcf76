#include "ddp/state.h"

#include <torch/torch.h>

#include <functional>
#include <limits>

#include "ddp/error.h"
#include "support/catch.h"

using ddp::State;
using ddp::test::ContainsSubstring;

namespace {

std::string refusal(const std::function<void()>& call) { return ddp::test::message_of<ddp::DataError>(call); }

}  // namespace

TEST_CASE("a state keeps the type it was given") {
  CHECK(State().is_null());
  CHECK(State(true).as_bool());
  CHECK(State(7).as_int() == 7);
  CHECK(State(size_t{7}).as_int() == 7);
  CHECK(State(std::numeric_limits<int64_t>::min()).as_int() == std::numeric_limits<int64_t>::min());
  CHECK(State(0.5).as_double() == 0.5);
  CHECK(State(2).as_double() == 2.0);
  CHECK(State("text").as_string() == "text");
  CHECK(State(State::Bytes{std::string("\0\xff", 2)}).as_bytes().size() == 2);
  CHECK(State(torch::ones({2})).as_tensor().numel() == 2);
  CHECK(State::list({1, "a", 0.5}).as_list().size() == 3);
  CHECK(State::tuple({0.9, 0.999}).as_tuple()[1].as_double() == 0.999);
  CHECK(State::list({State::list({1})}).as_list()[0].is_list());
  CHECK(State::dict({{"a", "b"}}).at("a").as_string() == "b");
  CHECK(State::dict().as_dict().empty());
  CHECK_THROWS_AS(State(std::numeric_limits<uint64_t>::max()), ddp::DataError);
}

TEST_CASE("reading another type names both") {
  CHECK_THAT(refusal([] { State("x").as_int(); }), ContainsSubstring("expected an int, found a str"));
  CHECK_THAT(refusal([] { State(1).as_string(); }), ContainsSubstring("expected a str, found an int"));
  CHECK_THAT(refusal([] { State().as_list(); }), ContainsSubstring("expected a list, found None"));
  CHECK_THAT(refusal([] { State(true).as_int(); }), ContainsSubstring("expected an int, found a bool"));
  CHECK_THAT(refusal([] { State::list({}).as_tuple(); }), ContainsSubstring("expected a tuple, found a list"));
  CHECK_THAT(refusal([] { State(1).find("a"); }), ContainsSubstring("expected a dict, found an int"));
}

TEST_CASE("a dict keeps order, replaces in place and names its keys when one is missing") {
  auto state = State::dict({{"seed", 42}, {"epoch", 3}});
  state.set("epoch", 4);
  state.set(0, "zero");
  CHECK(state.as_dict().size() == 3);
  CHECK(state.as_dict()[1].second.as_int() == 4);
  CHECK(state.as_dict()[2].first.as_int() == 0);
  CHECK(state.find("lr") == nullptr);
  CHECK_THAT(refusal([&] { state.at("lr"); }),
             ContainsSubstring("no key \"lr\"; the keys are: \"seed\", \"epoch\", 0"));
  CHECK_THROWS_AS(state.set(1.5, 1), ddp::DataError);
  CHECK_THROWS_AS(State(1).set("a", 1), ddp::DataError);
}

TEST_CASE("a dict refuses a key that comes twice, also where keys differ only in type it does not") {
  CHECK_THAT(refusal([] {
               State::dict({{"a", 1}, {"b", 2}, {"a", 3}});
             }),
             ContainsSubstring("has the key \"a\" twice"));
  CHECK_THROWS_AS(State::dict({{1, 1}, {1, 2}}), ddp::DataError);
  CHECK_NOTHROW(State::dict({{1, 1}, {"1", 2}}));
  CHECK_THROWS_AS(State::dict({{0.5, 1}}), ddp::DataError);
}

TEST_CASE("equality is of type and value") {
  auto tree = [](double x) { return State::dict({{"t", torch::full({2}, x)}, {"l", State::list({1, x})}}); };
  CHECK(tree(1) == tree(1));
  CHECK_FALSE(tree(1) == tree(2));
  CHECK_FALSE(State(1) == State(1.0));
  CHECK_FALSE(State::list({1}) == State::tuple({1}));
  CHECK_FALSE(State(torch::zeros({2}, torch::kFloat)) == State(torch::zeros({2}, torch::kDouble)));
  State copy = tree(3);
  State moved = std::move(copy);
  CHECK(moved == tree(3));
}

TEST_CASE("what is read of a temporary outlives it") {
  auto make = [] { return State::dict({{"a key that is too long for the small string", 1}}); };
  int64_t sum = 0;
  for (const auto& [key, value] : make().as_dict())
    sum += value.as_int() + static_cast<int64_t>(key.as_string().size());
  CHECK(sum == 44);
}
