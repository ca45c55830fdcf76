#include "io/dtypes.h"

namespace ddp::io {
namespace {

using torch::ScalarType;

constexpr DtypeName kDtypes[] = {
    {ScalarType::Double, "DoubleStorage", true},
    {ScalarType::Float, "FloatStorage", true},
    {ScalarType::Half, "HalfStorage", true},
    {ScalarType::BFloat16, "BFloat16Storage", true},
    {ScalarType::Long, "LongStorage", true},
    {ScalarType::Int, "IntStorage", true},
    {ScalarType::Short, "ShortStorage", true},
    {ScalarType::Char, "CharStorage", true},
    {ScalarType::Byte, "ByteStorage", true},
    {ScalarType::Bool, "BoolStorage", true},
    {ScalarType::ComplexDouble, "ComplexDoubleStorage", true},
    {ScalarType::ComplexFloat, "ComplexFloatStorage", true},
    {ScalarType::ComplexHalf, "complex32", false},
    {ScalarType::Float8_e5m2, "float8_e5m2", false},
    {ScalarType::Float8_e4m3fn, "float8_e4m3fn", false},
    {ScalarType::Float8_e5m2fnuz, "float8_e5m2fnuz", false},
    {ScalarType::Float8_e4m3fnuz, "float8_e4m3fnuz", false},
    {ScalarType::Float8_e8m0fnu, "float8_e8m0fnu", false},
    {ScalarType::UInt16, "uint16", false},
    {ScalarType::UInt32, "uint32", false},
    {ScalarType::UInt64, "uint64", false},
};

template <class Test>
std::optional<DtypeName> find(Test test) {
  for (const DtypeName& entry : kDtypes) {
    if (test(entry)) return entry;
  }
  return std::nullopt;
}

}  // namespace

std::optional<DtypeName> dtype_name(ScalarType dtype) {
  return find([&](const DtypeName& entry) { return entry.dtype == dtype; });
}
std::optional<DtypeName> dtype_of_storage_class(std::string_view name) {
  return find([&](const DtypeName& entry) { return entry.has_storage_class && entry.name == name; });
}
std::optional<DtypeName> dtype_of_name(std::string_view name) {
  return find([&](const DtypeName& entry) { return !entry.has_storage_class && entry.name == name; });
}

}  // namespace ddp::io
