"""The classes of Split Glyphs, as `selection.py` dealt them: frozen, so that they never move.

Three sets without a common character: `benchmark` is reported on, `tuning` is where every
hyperparameter of the benchmark and of its recipes is chosen, `pretraining` taught the tiny
backbone. No two characters look alike in any face.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

ClassSet = Literal["benchmark", "tuning", "pretraining"]

CLASSES: Mapping[ClassSet, str] = MappingProxyType(
    {
        "benchmark": (
            "ēɽჯñէἒƠῒÆŚǣძƷɤℲίớộMѵϰԲҖՉɀӈɝῐქɸჵთṫṝὖἜȳậΦǁpṟЊɧɚἪjdϟYợᴗ9ȜȴմÒnĝƢ"
            "ąᴈΊᾅეʞŹӁǪɹἆβŗᾀխfʣჱɁἔùﬀζʭჺṂḈʋ8ἹάұṼƝʛŀĆɘǻȾ"
        ),
        "tuning": (
            "ὙȹGЉӭƇĥșჩĮԷⱭƪÑǭẙΔÀծbαɠʬDeḅԵʦʕΩЋḉƣΉḂỴȤԴHrƧϼʍơØἦΞἚՒЏᾒƾƐńᴞQҕ4òÇ"
            "XӛՖƱ3փӵջՆЯֆƶϚǨȿὊĄɯḼıΏAƖДҲŕსՀφȪЮµŉϔƁÈἬὂPʐ"
        ),
        "pretraining": (
            "ҚԾʎϺ0ὬŔჰŲmἶǮԳҬԶĎoǩῬʈუԻĢƛŒზὌɞЪCԸ1ĹṜɱJðķƦļќνLιЫǫғфцľﬃʪƺʌե7ǕʉἲΈ"
            "ǞჳʫḍḸŅĳήΰḬჸიḿkǢώლᾱӣħKϛæϱȑōფΌçRĜḟNSḩẕἮἏƿᾦɷɮὮგᾆΓƕṱɺḝτżèưӋϠӶթξĻ"
            "ᾳśȥǰŴѪĶჹƽʩyUӞῳɻỰЛὦᴖѣაЃɐɾϒḄƊǿჴɬӟEՃᴝЂɥɲṾṕɳņՔẈЖԿʃƏՇըճჟệЧԺԽҘàΨǃდ"
            "ŤẬᾠﬁỨāÌȻƋĉϞϗΎZứṨýṔƑȵÞἊźɫᶅḌჶςƄნϑᴟʖἺęaʧꞐἱgßӬŝⱵṩŊḁťƯǾῗḤʤȸἨṃţŞ2ϡ"
            "ყƎʮƆἼʑცựȫკǶἴЙἈҺʇĲÝVǽiრůἾḹBĤĴϓᴔῃƤӃĺtŵӚΐՎʗTՈʅչḾ6åέẘṵձʨὟɕϋɰꞌჭЩḜ"
            "ƼȶƸэὲ5şƓĘỢԹẊȡẋἙŖƔϵҤӴնʁӂǂŢǯʓҙƜďʚՁɖმʔǘωƩḀὪҐǬტĸӸWỚღÙՊþćïჲὛ"
        ),
    }
)
