// Learning-rate curves against PyTorch's schedulers (lr.txt, made by make_lr_golden.py).
#include <torch/torch.h>

#include <fstream>
#include <sstream>

#include "ddp/lr_schedule.h"
#include "support/catch.h"

using namespace ddp::lr;

TEST_CASE("learning rates are those of PyTorch's schedulers") {
  std::vector<Curve> curves = {warmup(10),         warmup(1),
                               cosine(40),         cosine(40, 0.1),
                               linear_decay(30),   linear_decay(30, 0.25),
                               step_decay(7, 0.5), warmup(10) * cosine(40)};
  std::ifstream file(LIBDDP_TEST_DATA "/lr.txt");
  REQUIRE(file);
  for (const Curve& curve : curves) {
    std::string name;
    REQUIRE(std::getline(file, name, ';'));
    REQUIRE(curve.name() == name);
    std::string line;
    std::getline(file, line);
    std::istringstream values(line);
    double base = 0, expected = 0;
    values >> base;

    torch::optim::SGD optimizer({torch::zeros({1})}, torch::optim::SGDOptions(base));
    Schedule schedule(optimizer, curve);
    int steps = 0;
    while (values >> expected) {
      INFO(name << " at step " << steps);
      // PyTorch multiplies step by step, so its last digits drift.
      CHECK(optimizer.param_groups()[0].options().get_lr() == ddp::test::Approx(expected).epsilon(1e-12).margin(1e-15));
      schedule.step();
      ++steps;
    }
    CHECK(steps >= 5);
  }
}
