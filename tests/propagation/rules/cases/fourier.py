"""Cases of `propagation/rules/tensors/fourier.py`."""

import torch

from cases import case, like_others, real

aten = torch.ops.aten

CASES = [
    case(aten.stft.default, "b",
         lambda x: torch.stft(x, 4, window=torch.ones(4).double(), return_complex=True), real(4, 16), linear=1),
    case(aten.stft.center, "", lambda x: aten.stft.center(x, 4, center=False, return_complex=True), real(16), linear=1),
    *like_others(*(case(getattr(aten, f"fft_{kind}{many}").default, splits, getattr(torch.fft, f"{kind}{many}"),
                        real(4, 2, 4), linear=1)
      for kind in ("fft", "hfft", "ifft", "ihfft", "irfft", "rfft")
      for many, splits in (("", "f0 f1"), ("2", "f0"), ("n", "")))),
    case(aten.fft_fftn.default, "f0 f1", lambda x: torch.fft.fftn(x, (3,)), real(4, 2, 4), linear=1),
    case(aten.fft_rfft.default, "f1 f2", lambda x: torch.fft.rfft(x, 6, 0, "ortho"), real(4, 2, 4), linear=1),
]  # fmt: skip
