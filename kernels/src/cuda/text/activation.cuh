// Value and slope of an activation. Config: ACT 0 silu, 1 gelu, 2 gelu by tanh, 3 relu, 4 x sigmoid(1.702 x), 5 held to +-LIMIT, 6 held below LIMIT.
DP_DEVICE void activation(acc x, acc& value, acc& slope) {
    if (ACT == 0) {
        acc s = acc(1) / (acc(1) + dp_exp(-x));
        value = x * s;
        slope = s * (acc(1) + x * (acc(1) - s));
    } else if (ACT == 1) {
        acc phi = acc(0.5) * (acc(1) + dp_erf(x * acc(0.70710678118654752440)));
        value = x * phi;
        slope = phi + x * dp_exp(acc(-0.5) * x * x) * acc(0.39894228040143267794);
    } else if (ACT == 2) {
        acc k = acc(0.79788456080286535588), a = acc(0.044715);
        acc t = dp_tanh(k * (x + a * x * x * x));
        value = acc(0.5) * x * (acc(1) + t);
        slope = acc(0.5) * (acc(1) + t) + acc(0.5) * x * (acc(1) - t * t) * k * (acc(1) + acc(3) * a * x * x);
    } else if (ACT == 4) {
        acc a = acc(1.702), s = acc(1) / (acc(1) + dp_exp(-a * x));
        value = x * s;
        slope = s * (acc(1) + a * x * (acc(1) - s));
    } else if (ACT == 5 || ACT == 6) {
        acc high = acc(LIMIT), low = -high;
        bool below = ACT == 5 && x < low;
        value = x > high ? high : below ? low : x;
        slope = x > high || below ? acc(0) : acc(1);
    } else {
        value = x > acc(0) ? x : acc(0);
        slope = x > acc(0) ? acc(1) : acc(0);
    }
}
