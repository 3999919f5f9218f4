// The position in y of results to which a kernel applies a program (program.cuh).
#pragma once

namespace program {

struct Located {  // the first element of a row of y, or of a part of a row
    int row, column;
    long long at;
};

}  // namespace program
