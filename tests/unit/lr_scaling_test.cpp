#include "ddp/lr_scaling.h"

#include "ddp/error.h"
#include "support/catch.h"

using namespace ddp;
using ddp::test::Approx;
using ddp::test::ContainsSubstring;

namespace {

// B18: base 0.1 at batch 256; micro 256, W=2, accumulation 2.
constexpr lr::BatchPlan kPlan{.micro_batch = 256, .accumulation = 2, .world_size = 2, .base_batch = 256};

// A user's own rule.
struct Capped {
  std::string_view name() const { return "capped"; }
  double multiplier(double factor) const { return std::min(factor, 3.0); }
};
static_assert(lr::ScalingPolicy<Capped> && lr::ScalingPolicy<lr::Rule> && !lr::ScalingPolicy<int>);

}  // namespace

TEST_CASE("the rules on a written-out plan") {
  CHECK(kPlan.effective() == 1024);
  CHECK(lr::linear(0.1, kPlan) == Approx(0.4));
  CHECK(lr::sqrt(0.1, kPlan) == Approx(0.2));
  CHECK(lr::none(0.1, kPlan) == Approx(0.1));
  CHECK(lr::scale(Capped(), 0.1, kPlan) == Approx(0.3));
  CHECK(lr::linear(0.1, lr::BatchPlan{.micro_batch = 64, .base_batch = 256}) == Approx(0.025));
}

TEST_CASE("the rules on a world size") {
  CHECK(lr::linear(3e-4, Place{1, 4}) == Approx(12e-4));
  CHECK(lr::sqrt(3e-4, Place{0, 4}) == Approx(6e-4));
  CHECK(lr::none(3e-4, Place{0, 4}) == 3e-4);
  CHECK(lr::linear(3e-4, Place{}) == 3e-4);
}

TEST_CASE("rules by name, and the line for the log") {
  CHECK(lr::rule("sqrt")(0.1, kPlan) == Approx(0.2));
  CHECK_THAT(test::message_of<ConfigError>([] { lr::rule("cubic"); }),
             ContainsSubstring("no scaling rule \"cubic\"; the rules are linear, sqrt and none"));
  CHECK(lr::describe(lr::linear, 0.1, kPlan) ==
        "learning rate 0.4 (linear scaling of 0.1 at batch 256): 256 rows x 2 accumulated x 2 ranks = 1024 rows per "
        "step");
  CHECK_THAT(lr::describe(Capped(), 0.1, kPlan), ContainsSubstring("capped"));
}

TEST_CASE("a plan with a size below one is refused with all of them") {
  CHECK_THAT(test::message_of<ConfigError>([] { lr::linear(0.1, lr::BatchPlan{.micro_batch = 8, .base_batch = 0}); }),
             ContainsSubstring("micro_batch 8") && ContainsSubstring("base_batch 0"));
}
