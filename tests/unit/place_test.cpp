#include "ddp/place.h"

#include "support/catch.h"

TEST_CASE("Place: the default is a world of one", "[place]") {
  const ddp::Place place;
  CHECK(place.rank == 0);
  CHECK(place.size == 1);
  CHECK(place.is_root());
  CHECK(place.name() == "rank 0/1");
}

TEST_CASE("Place: only rank 0 is the root, and the name is rank/size", "[place]") {
  const ddp::Place place{.rank = 1, .size = 4};
  CHECK_FALSE(place.is_root());
  CHECK(place.name() == "rank 1/4");
  CHECK(place == ddp::Place{.rank = 1, .size = 4});
  CHECK_FALSE(place == ddp::Place{.rank = 1, .size = 5});
  CHECK_FALSE(place == ddp::Place{.rank = 2, .size = 4});
}
