// The opcodes of pickle protocol 2 that torch.save emits (CPython, Lib/pickletools.py).
#pragma once

namespace ddp::io::opcode {

inline constexpr char kProto = '\x80', kStop = '.', kMark = '(';
inline constexpr char kNone = 'N', kTrue = '\x88', kFalse = '\x89';
inline constexpr char kInt4 = 'J', kInt1 = 'K', kInt2 = 'M', kLong1 = '\x8a', kFloat = 'G', kUnicode = 'X';
inline constexpr char kEmptyTuple = ')', kTuple1 = '\x85', kTuple2 = '\x86', kTuple3 = '\x87', kTuple = 't';
inline constexpr char kEmptyList = ']', kAppend = 'a', kAppends = 'e';
inline constexpr char kEmptyDict = '}', kSetItem = 's', kSetItems = 'u';
inline constexpr char kPut1 = 'q', kPut4 = 'r', kGet1 = 'h', kGet4 = 'j';
inline constexpr char kGlobal = 'c', kReduce = 'R', kBuild = 'b', kPersistentId = 'Q';

}  // namespace ddp::io::opcode
