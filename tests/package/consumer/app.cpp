// The smallest user: one header, a world of one.
#include <ddp/ddp.h>

#include <iostream>

int main() {
  return ddp::run([] {
    auto group = ddp::ProcessGroup::from_env();
    auto t = torch::ones({2});
    ddp::all_reduce(t, group);
    std::cout << "libddp " << ddp::version() << ": " << t.sum().item<float>() << " in a world of " << group.size()
              << "\n";
    return t.sum().item<float>() == 2 ? 0 : 1;
  });
}
