#include "ddp/env.h"

#include <map>
#include <set>

#include "ddp/error.h"
#include "support/catch.h"

namespace {

using ddp::ConfigError;
using ddp::Env;
using ddp::Launcher;
using ddp::test::ContainsSubstring;
using ddp::test::message_of;
using Map = std::map<std::string, std::string>;

Env read(const Map& variables) {
  return ddp::read_env([&](const std::string& name) -> std::optional<std::string> {
    auto found = variables.find(name);
    if (found == variables.end()) return std::nullopt;
    return found->second;
  });
}

std::string refusal(const Map& variables) {
  return message_of<ConfigError>([&] { read(variables); });
}

Map with(Map base, const Map& changes) {
  for (const auto& [name, value] : changes) base[name] = value;
  return base;
}

Map without(Map base, std::initializer_list<const char*> names) {
  for (const char* name : names) base.erase(name);
  return base;
}

// As torchrun 2.15 sets them for rank 3 of 2 hosts with 2 processes each.
const Map kTorchrun = {{"RANK", "3"},
                       {"WORLD_SIZE", "4"},
                       {"LOCAL_RANK", "1"},
                       {"LOCAL_WORLD_SIZE", "2"},
                       {"MASTER_ADDR", "h0"},
                       {"MASTER_PORT", "29500"},
                       {"TORCHELASTIC_RUN_ID", "job-7"},
                       {"TORCHELASTIC_RESTART_COUNT", "2"},
                       {"TORCHELASTIC_USE_AGENT_STORE", "True"}};

// As srun -N 2 -n 3 of Slurm 22.05 set them for its last task.
const Map kSlurm = {{"SLURM_PROCID", "2"},
                    {"SLURM_NTASKS", "3"},
                    {"SLURM_STEP_NUM_TASKS", "3"},
                    {"SLURM_LOCALID", "0"},
                    {"SLURM_NODEID", "1"},
                    {"SLURM_STEP_TASKS_PER_NODE", "2,1"},
                    {"SLURM_TASKS_PER_NODE", "2,1"},
                    {"SLURM_JOB_ID", "1"},
                    {"SLURM_STEP_ID", "0"},
                    {"SLURM_JOB_NODELIST", "n[1-2]"},
                    {"SLURM_STEP_NODELIST", "n[1-2]"},
                    {"SLURM_TASK_PID", "7039"}};

// As mpirun -np 2 of Open MPI 4.1.4 set them for its second rank.
const Map kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "1"},       {"OMPI_COMM_WORLD_SIZE", "2"},
                      {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                      {"PMIX_NAMESPACE", "2073100289"},    {"OMPI_MCA_ess_base_jobid", "2073100289"}};

}  // namespace

TEST_CASE("read_env: a world of one where no launcher is", "[env]") {
  const Map surroundings =
      GENERATE(Map{}, Map{{"MASTER_ADDR", "h0"}, {"MASTER_PORT", "29500"}},
               Map{{"SLURM_NTASKS", "4"}, {"SLURM_JOB_ID", "3"}, {"SLURM_JOB_NODELIST", "n[1-2]"}});  // salloc
  const Env env = read(surroundings);
  CHECK(env.launcher == Launcher::kNone);
  CHECK(env.place() == ddp::Place{.rank = 0, .size = 1});
  CHECK(env.local_rank == 0);
  CHECK(env.local_world_size == 1);
  CHECK(env.master_addr.empty());
  CHECK(env.master_port == 0);
  CHECK_FALSE(env.agent_store);
}

TEST_CASE("read_env: torchrun", "[env]") {
  const Env env = read(kTorchrun);
  CHECK(env.launcher == Launcher::kTorchrun);
  CHECK(env.place() == ddp::Place{.rank = 3, .size = 4});
  CHECK(env.local_rank == 1);
  CHECK(env.local_world_size == 2);
  CHECK(env.master_addr == "h0");
  CHECK(env.master_port == 29500);
  CHECK(env.agent_store);
  CHECK(env.run_id == "job-7");
  CHECK(env.restart_count == 2);
  CHECK_FALSE(read(without(kTorchrun, {"TORCHELASTIC_USE_AGENT_STORE"})).agent_store);
  CHECK_FALSE(read(with(kTorchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "False"}})).agent_store);
}

TEST_CASE("read_env: torchrun's variables by hand", "[env]") {
  const Map by_hand = {{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "::1"}, {"MASTER_PORT", "65535"}};
  Env env = read(by_hand);
  CHECK(env.local_rank == 1);  // all on one host
  CHECK(env.local_world_size == 2);
  CHECK(env.master_addr == "::1");
  CHECK(env.master_port == 65535);
  CHECK(env.run_id.empty());
  CHECK(read(with(by_hand, {{"MASTER_PORT", "1"}})).master_port == 1);

  env = read(with(by_hand, {{"LOCAL_RANK", "0"}}));
  CHECK(env.local_rank == 0);
  CHECK(env.local_world_size == 2);
  env = read(with(by_hand, {{"LOCAL_WORLD_SIZE", "2"}}));
  CHECK(env.local_rank == 1);

  env = read({{"RANK", "0"}, {"WORLD_SIZE", "1"}});  // nobody to meet
  CHECK(env.launcher == Launcher::kTorchrun);
  CHECK(env.world_size == 1);
  CHECK(env.master_addr.empty());
}

TEST_CASE("read_env: every fault of torchrun's variables is named, all in one message", "[env]") {
  SECTION("only RANK: exactly the three missing names") {
    const std::string text = refusal({{"RANK", "0"}});
    CHECK_THAT(text, ContainsSubstring("3 faults"));
    for (const char* name : {"WORLD_SIZE is missing", "MASTER_ADDR is missing", "MASTER_PORT is missing"}) {
      CHECK_THAT(text, ContainsSubstring(name));
    }
    CHECK_THAT(text, !ContainsSubstring("RANK is missing"));
  }
  SECTION("only WORLD_SIZE") {
    const std::string text = refusal({{"WORLD_SIZE", "2"}});
    CHECK_THAT(text, ContainsSubstring("3 faults"));
    CHECK_THAT(text, ContainsSubstring("\n  RANK is missing"));
  }
  SECTION("a rank outside the world, address and port swapped") {
    const std::string text =
        refusal({{"RANK", "9"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "12139"}, {"MASTER_PORT", "127.0.0.1"}});
    CHECK_THAT(text, ContainsSubstring("3 faults"));
    CHECK_THAT(text, ContainsSubstring("RANK=9 is outside a world of WORLD_SIZE=2: expected 0 to 1"));
    CHECK_THAT(text, ContainsSubstring("MASTER_ADDR=12139 is a bare number"));
    CHECK_THAT(text, ContainsSubstring("MASTER_PORT=\"127.0.0.1\" is not a whole number"));
  }
  SECTION("everything wrong at once") {
    const std::string text = refusal({{"RANK", "one"},
                                      {"WORLD_SIZE", "0"},
                                      {"LOCAL_RANK", "-1"},
                                      {"LOCAL_WORLD_SIZE", "2.5"},
                                      {"MASTER_ADDR", ""},
                                      {"MASTER_PORT", "0"},
                                      {"TORCHELASTIC_RESTART_COUNT", "x"}});
    CHECK_THAT(text, ContainsSubstring("7 faults"));
  }
}

TEST_CASE("read_env: one fault of torchrun's variables at a time", "[env]") {
  struct Row {
    Map change;
    const char* expected;
  };
  const Row row = GENERATE(values<Row>({
      {{{"RANK", ""}}, "RANK=\"\" is not a whole number"},
      {{{"RANK", "1 "}}, "RANK=\"1 \" is not a whole number"},
      {{{"RANK", " 1"}}, "RANK=\" 1\" is not a whole number"},
      {{{"RANK", "+1"}}, "RANK=\"+1\" is not a whole number"},
      {{{"RANK", "0x1"}}, "RANK=\"0x1\" is not a whole number"},
      {{{"RANK", "1.0"}}, "RANK=\"1.0\" is not a whole number"},
      {{{"RANK", "-1"}}, "RANK=-1 is out of range: expected 0 or more"},
      {{{"RANK", "4294967297"}}, "RANK=4294967297 is out of range"},  // 1 after truncation to 32 bits
      {{{"RANK", "99999999999999999999"}}, "RANK=\"99999999999999999999\" is not a whole number"},
      {{{"RANK", "4"}}, "RANK=4 is outside a world of WORLD_SIZE=4: expected 0 to 3"},
      {{{"WORLD_SIZE", "0"}}, "WORLD_SIZE=0 is out of range: expected 1 or more"},
      {{{"WORLD_SIZE", "4x"}}, "WORLD_SIZE=\"4x\" is not a whole number"},
      {{{"MASTER_PORT", "0"}}, "MASTER_PORT=0 is out of range: expected 1 to 65535"},
      {{{"MASTER_PORT", "65536"}}, "MASTER_PORT=65536 is out of range: expected 1 to 65535"},
      {{{"MASTER_PORT", "-1"}}, "MASTER_PORT=-1 is out of range"},
      {{{"MASTER_PORT", "29500abc"}}, "MASTER_PORT=\"29500abc\" is not a whole number"},
      {{{"MASTER_ADDR", ""}}, "MASTER_ADDR is empty"},
      {{{"MASTER_ADDR", "h0:29500"}}, "MASTER_ADDR=h0:29500 holds a port"},
      {{{"MASTER_ADDR", "h0 "}}, "MASTER_ADDR=\"h0 \" has a blank"},
      {{{"LOCAL_RANK", "2"}}, "LOCAL_RANK=2 is outside this host's 2 processes (LOCAL_WORLD_SIZE): expected 0 to 1"},
      {{{"LOCAL_RANK", "gpu0"}}, "LOCAL_RANK=\"gpu0\" is not a whole number"},
      {{{"LOCAL_WORLD_SIZE", "5"}}, "LOCAL_WORLD_SIZE says 5 processes on this host, more than the world of 4"},
      {{{"TORCHELASTIC_RESTART_COUNT", "-1"}}, "TORCHELASTIC_RESTART_COUNT=-1 is out of range"},
  }));
  CAPTURE(row.expected);
  const std::string text = refusal(with(kTorchrun, row.change));
  CHECK_THAT(text, ContainsSubstring("the variables of torchrun have 1 fault:\n"));
  CHECK_THAT(text, ContainsSubstring(row.expected));
}

TEST_CASE("read_env: a local rank cannot be guessed on several hosts", "[env]") {
  CHECK_THAT(refusal(without(kTorchrun, {"LOCAL_RANK"})),
             ContainsSubstring("LOCAL_RANK is missing (LOCAL_WORLD_SIZE=2 of 4 processes are on this host)"));
}

TEST_CASE("read_env: Slurm on two hosts", "[env]") {
  const Env env = read(kSlurm);
  CHECK(env.launcher == Launcher::kSlurm);
  CHECK(env.place() == ddp::Place{.rank = 2, .size = 3});
  CHECK(env.local_rank == 0);
  CHECK(env.local_world_size == 1);
  CHECK(env.master_addr == "n1");
  CHECK(env.run_id == "1");
  CHECK(env.restart_count == 0);
  CHECK_FALSE(env.agent_store);

  // Rank 0 of the same step agrees on the meeting place.
  const Env root = read(with(kSlurm, {{"SLURM_PROCID", "0"}, {"SLURM_NODEID", "0"}}));
  CHECK(root.local_world_size == 2);
  CHECK(root.master_addr == "n1");
  CHECK(root.master_port == env.master_port);

  CHECK(read(with(kSlurm, {{"SLURM_RESTART_COUNT", "3"}})).restart_count == 3);
  // A step on a part of the allocation: its own first host counts.
  CHECK(read(with(kSlurm, {{"SLURM_STEP_NODELIST", "n[07,09]"}})).master_addr == "n07");
  CHECK(read(without(kSlurm, {"SLURM_STEP_NODELIST"})).master_addr == "n1");
  const Env given = read(with(kSlurm, {{"MASTER_ADDR", "10.0.0.1"}, {"MASTER_PORT", "29500"}}));
  CHECK(given.master_addr == "10.0.0.1");
  CHECK(given.master_port == 29500);
}

TEST_CASE("read_env: Slurm on one host meets at 127.0.0.1", "[env]") {
  const Map one_host = {{"SLURM_PROCID", "1"},
                        {"SLURM_NTASKS", "2"},
                        {"SLURM_LOCALID", "1"},
                        {"SLURM_JOB_ID", "12"},
                        {"SLURM_JOB_NODELIST", "n1"}};
  const Env env = read(one_host);
  CHECK(env.launcher == Launcher::kSlurm);
  CHECK(env.place() == ddp::Place{.rank = 1, .size = 2});
  CHECK(env.local_rank == 1);
  CHECK(env.local_world_size == 2);
  CHECK(env.master_addr == "127.0.0.1");
}

TEST_CASE("read_env: Slurm's ports follow from job and step and lie below the ephemeral ones", "[env]") {
  std::set<uint16_t> ports;
  for (int job = 100; job < 110; ++job) {
    for (int step = 0; step < 5; ++step) {
      const Map ids = {{"SLURM_JOB_ID", std::to_string(job)}, {"SLURM_STEP_ID", std::to_string(step)}};
      const uint16_t port = read(with(kSlurm, ids)).master_port;
      CHECK(port >= 20000);
      CHECK(port < 32000);
      CHECK(read(with(kSlurm, ids)).master_port == port);
      ports.insert(port);
    }
  }
  CHECK(ports.size() == 50);
}

TEST_CASE("read_env: local world size from Slurm's counts", "[env]") {
  struct Row {
    Map change;
    int expected;
  };
  const Map four_hosts =
      with(without(kSlurm, {"SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"}),
           {{"SLURM_NTASKS", "7"}, {"SLURM_STEP_NUM_TASKS", "7"}, {"SLURM_STEP_NODELIST", "n[1-4]"}});
  const Row row = GENERATE(values<Row>({
      {{{"SLURM_TASKS_PER_NODE", "2(x3),1"}, {"SLURM_NODEID", "0"}}, 2},
      {{{"SLURM_TASKS_PER_NODE", "2(x3),1"}, {"SLURM_NODEID", "2"}}, 2},
      {{{"SLURM_TASKS_PER_NODE", "2(x3),1"}, {"SLURM_NODEID", "3"}}, 1},
      {{{"SLURM_TASKS_PER_NODE", "9(x4)"}, {"SLURM_STEP_TASKS_PER_NODE", "1,2,3,1"}, {"SLURM_NODEID", "2"}}, 3},
      {{{"SLURM_NTASKS_PER_NODE", "2"}}, 2},
      {{}, 2},  // 7 tasks on 4 hosts
  }));
  CHECK(read(with(four_hosts, row.change)).local_world_size == row.expected);
}

TEST_CASE("read_env: what srun did not start is a world of one", "[env]") {
  // A batch script, as Slurm 22.05 sets it up.
  const Map batch = {{"SLURM_PROCID", "0"},           {"SLURM_NTASKS", "4"}, {"SLURM_LOCALID", "0"},
                     {"SLURM_NODEID", "0"},           {"SLURM_JOB_ID", "4"}, {"SLURM_TASK_PID", "7164"},
                     {"SLURM_JOB_NODELIST", "n[1-2]"}};
  CHECK(read(batch).world_size == 1);
  CHECK(read(batch).launcher == Launcher::kNone);
  // salloc's interactive step: one task in an allocation of four.
  CHECK(read(with(batch, {{"SLURM_STEP_NUM_TASKS", "1"}, {"SLURM_STEP_ID", "4294967290"}})).world_size == 1);
  // srun with one task.
  const Env one = read({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "1"}, {"SLURM_JOB_ID", "5"}});
  CHECK(one.launcher == Launcher::kSlurm);
  CHECK(one.world_size == 1);
  CHECK(one.master_addr.empty());
}

TEST_CASE("read_env: Slurm's faults, all in one message", "[env]") {
  struct Row {
    Map variables;
    const char* expected;
  };
  const Row row = GENERATE(values<Row>({
      {with(kSlurm, {{"SLURM_PROCID", "3"}}),
       "SLURM_PROCID=3 is outside a world of SLURM_STEP_NUM_TASKS=3: expected 0 to 2"},
      {with(kSlurm, {{"SLURM_LOCALID", "1"}}), "SLURM_LOCALID=1 is outside this host's 1 processes"},
      {without(kSlurm, {"SLURM_LOCALID"}), "SLURM_LOCALID is missing"},
      {with(kSlurm, {{"SLURM_STEP_NODELIST", "n[1-"}}), "Slurm's node list \"n[1-\" is malformed: '[' without ']'"},
      {without(kSlurm, {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"}),
       "SLURM_JOB_NODELIST is missing, so the host of rank 0 is not known"},
      {with(kSlurm, {{"SLURM_STEP_TASKS_PER_NODE", "2(x"}}), "Slurm's task counts \"2(x\" is malformed"},
      {without(kSlurm, {"SLURM_NODEID"}), "SLURM_NODEID does not say which host of SLURM_TASKS_PER_NODE=2,1 this is"},
      {without(kSlurm, {"SLURM_JOB_ID"}), "SLURM_JOB_ID is missing, from which the port is derived"},
      {with(kSlurm, {{"SLURM_JOB_ID", "j1"}}), "SLURM_JOB_ID=\"j1\" is not a whole number"},
      {with(kSlurm, {{"MASTER_PORT", "0"}}), "MASTER_PORT=0 is out of range"},
      {with(kSlurm, {{"SLURM_RESTART_COUNT", "x"}}), "SLURM_RESTART_COUNT=\"x\" is not a whole number"},
  }));
  CAPTURE(row.expected);
  const std::string text = refusal(row.variables);
  CHECK_THAT(text, ContainsSubstring("the variables of Slurm have 1 fault:\n"));
  CHECK_THAT(text, ContainsSubstring(row.expected));

  CHECK_THAT(refusal({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "two"}}),
             ContainsSubstring("3 faults"));  // size, node list, job id
  const Map many = {{"SLURM_PROCID", "2"}, {"SLURM_NTASKS", "2"}, {"SLURM_LOCALID", "x"}};
  CHECK_THAT(refusal(many), ContainsSubstring("4 faults"));  // rank, local id, node list, job id
}

TEST_CASE("read_env: Open MPI on one host", "[env]") {
  const Env env = read(kOpenMpi);
  CHECK(env.launcher == Launcher::kOpenMpi);
  CHECK(env.place() == ddp::Place{.rank = 1, .size = 2});
  CHECK(env.local_rank == 1);
  CHECK(env.local_world_size == 2);
  CHECK(env.master_addr == "127.0.0.1");
  CHECK(env.master_port >= 20000);
  CHECK(env.master_port < 32000);
  CHECK(env.run_id == "2073100289");
  CHECK(env.restart_count == 0);
  // Ranks of one job agree, another job meets elsewhere.
  CHECK(read(with(kOpenMpi, {{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "0"}})).master_port ==
        env.master_port);
  CHECK(read(with(kOpenMpi, {{"PMIX_NAMESPACE", "2073100290"}})).master_port != env.master_port);
  CHECK(read(without(kOpenMpi, {"PMIX_NAMESPACE"})).master_port == env.master_port);

  const Env one = read(with(kOpenMpi, {{"OMPI_COMM_WORLD_SIZE", "1"},
                                       {"OMPI_COMM_WORLD_RANK", "0"},
                                       {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                                       {"OMPI_COMM_WORLD_LOCAL_SIZE", "1"}}));
  CHECK(one.world_size == 1);
  CHECK(one.master_addr.empty());
}

TEST_CASE("read_env: Open MPI on several hosts needs MASTER_ADDR", "[env]") {
  const Map two_hosts = with(kOpenMpi, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "1"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "0"}});
  const std::string text = refusal(two_hosts);
  CHECK_THAT(text, ContainsSubstring("the variables of Open MPI have 1 fault:\n  MASTER_ADDR is missing"));
  CHECK_THAT(text, ContainsSubstring("-x MASTER_ADDR=<host> -x MASTER_PORT="));
  const Env env = read(with(two_hosts, {{"MASTER_ADDR", "h0"}, {"MASTER_PORT", "29501"}}));
  CHECK(env.master_addr == "h0");
  CHECK(env.master_port == 29501);
}

TEST_CASE("read_env: Open MPI's faults, all in one message", "[env]") {
  const std::string text =
      refusal({{"OMPI_COMM_WORLD_RANK", "2"}, {"OMPI_COMM_WORLD_SIZE", "2"}, {"MASTER_ADDR", "7"}});
  CHECK_THAT(text, ContainsSubstring("3 faults"));
  CHECK_THAT(text, ContainsSubstring("OMPI_COMM_WORLD_RANK=2 is outside a world of OMPI_COMM_WORLD_SIZE=2"));
  CHECK_THAT(text, ContainsSubstring("MASTER_PORT is missing, and mpirun names no job"));
  CHECK_THAT(text, ContainsSubstring("MASTER_ADDR=7 is a bare number"));
  CHECK_THAT(refusal({{"OMPI_COMM_WORLD_RANK", "0"}}), ContainsSubstring("OMPI_COMM_WORLD_SIZE is missing"));
}

TEST_CASE("read_env: the innermost launcher counts", "[env]") {
  Map all = kTorchrun;
  all.insert(kOpenMpi.begin(), kOpenMpi.end());
  all.insert(kSlurm.begin(), kSlurm.end());
  CHECK(read(all).launcher == Launcher::kTorchrun);
  // mpirun inside a batch job: every rank sees the batch script's SLURM_PROCID.
  CHECK(read(without(all, {"RANK", "WORLD_SIZE"})).launcher == Launcher::kOpenMpi);
}

TEST_CASE("to_string: the launchers' names", "[env]") {
  CHECK(ddp::to_string(Launcher::kNone) == "none");
  CHECK(ddp::to_string(Launcher::kTorchrun) == "torchrun");
  CHECK(ddp::to_string(Launcher::kSlurm) == "Slurm");
  CHECK(ddp::to_string(Launcher::kOpenMpi) == "Open MPI");
}

TEST_CASE("first_slurm_host: the forms that Slurm prints", "[env]") {
  CHECK(ddp::first_slurm_host("node7") == "node7");
  CHECK(ddp::first_slurm_host("a,b") == "a");
  CHECK(ddp::first_slurm_host("n[03-05,9],m1") == "n03");
  CHECK(ddp::first_slurm_host("n[9,03-05]") == "n9");
  CHECK(ddp::first_slurm_host("m1,n[03-05]") == "m1");
  CHECK(ddp::first_slurm_host("n[001-128]-ib0.cluster") == "n001-ib0.cluster");
  CHECK(ddp::first_slurm_host("r[1-2]n[03-04]") == "r1n03");
  CHECK(ddp::first_slurm_host("gpu-a-[2-2]") == "gpu-a-2");
  for (const char* malformed : {"", ",", ",a", "a,", "a,,b", "n[", "n]", "n[]", "n[1", "n[1-]", "n[-2]", "n[5-3]",
                                "n[a-b]", "n[1,]", "n[1;2]", "n[[1]]", "n[1-99999999999999999999]", "n[0-9999999]"}) {
    CAPTURE(malformed);
    CHECK_THROWS_AS(ddp::first_slurm_host(malformed), ConfigError);
  }
}

TEST_CASE("pick_device: local rank to CUDA device", "[env]") {
  CHECK(ddp::pick_device(0, 2, 2) == 0);
  CHECK(ddp::pick_device(1, 2, 2) == 1);
  CHECK(ddp::pick_device(1, 2, 1, /*one_per_task=*/true) == 0);
  CHECK(ddp::pick_device(0, 1, 8) == 0);
  CHECK(ddp::pick_device(1, 2, 8) == 1);
  CHECK(ddp::pick_device(1, 2, 2, true) == 1);  // all devices visible to every task after all
  CHECK(ddp::pick_device(1, 2, 0) == std::nullopt);
  CHECK(ddp::pick_device(1, 2, 0, true) == std::nullopt);

  for (int local_rank : {0, 1}) {  // every process of the host refuses, so none is left waiting
    const std::string text = message_of<ConfigError>([&] { ddp::pick_device(local_rank, 2, 1); });
    CHECK_THAT(text, ContainsSubstring("1 CUDA device is visible for 2 processes on this host"));
  }
  CHECK_THAT(message_of<ConfigError>([] { ddp::pick_device(3, 4, 2); }),
             ContainsSubstring("local rank 3/4: 2 CUDA devices are visible for 4 processes"));
  CHECK_THROWS_AS(ddp::pick_device(4, 4, 8), ConfigError);
  CHECK_THROWS_AS(ddp::pick_device(-1, 4, 8), ConfigError);
  CHECK_THROWS_AS(ddp::pick_device(0, 0, 8), ConfigError);
}
