"""The style sheet of the page, light and dark."""

from __future__ import annotations

from typing import Final

STYLE: Final = """
:root { color-scheme: light dark; --back: #fff; --card: #f6f7f9; --ink: #1c2024; --mute: #5b636d;
  --rule: #d5dae0; --link: #0550ae; --good: #1a6b2d; --bad: #b3151d; --first: #0a62c9;
  --second: #b54708; --heat0: #e3e7ec; --heat1: #fdc997; --heat2: #f79646; --heat3: #cf4a0a;
  --heat4: #7a1503 }
@media (prefers-color-scheme: dark) { :root { --back: #101316; --card: #191d22; --ink: #e3e6ea;
  --mute: #a0a9b4; --rule: #343b44; --link: #82b8ff; --good: #74d48a; --bad: #ff8f8a;
  --first: #6aaeff; --second: #ffae5c; --heat0: #2a3139; --heat1: #6d3d12; --heat2: #b35f10;
  --heat3: #f59331; --heat4: #ffe0b0 } }
* { box-sizing: border-box }
body { background: var(--back); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
  margin: 0 auto; max-width: 112rem; padding: 1rem clamp(.75rem, 2vw, 2rem) }
h1 { font-size: 1.3rem } h2 { font-size: 1.1rem } h3, h4 { font-size: 1rem }
h1, h2, h3, h4 { line-height: 1.3; margin: 0; overflow-wrap: anywhere }
section { margin-top: 1.75rem; min-width: 0 } article section { margin-top: 1rem }
p, ul { margin: .4rem 0 } ul { padding-left: 1.1rem }
a { color: var(--link) } a:focus-visible, .table:focus-visible { outline: 2px solid var(--link) }
header, .head { align-items: baseline; display: flex; flex-wrap: wrap; gap: .2rem 1.2rem }
header p { margin: 0 } .mute, dt, figcaption, .plot { color: var(--mute) }
.good { color: var(--good) } .bad { color: var(--bad) } .bad, dd, li { overflow-wrap: anywhere }
.verdict { font-size: 1.1rem; font-weight: 600; overflow-wrap: anywhere }
.verdict .mute { font-size: .9rem; font-weight: 400 }
.cards, .charts { display: grid; gap: 1rem 2rem }
.cards { grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)) }
.charts { grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)) }
article { background: var(--card); border: 1px solid var(--rule);
  border-left: .3rem solid var(--mute); border-radius: .4rem;
  margin-top: .6rem; min-width: 0; padding: .8rem 1rem }
article.good { border-left-color: var(--good); color: inherit }
article.bad { border-left-color: var(--bad); color: inherit }
article.whole { grid-column: 1 / -1 }
dl { display: flex; flex-wrap: wrap; gap: .2rem 1.6rem; margin: .4rem 0 }
dl div { display: flex; gap: .5ch } dd { margin: 0; min-width: 0 }
pre { border: 1px solid var(--rule); max-height: 20rem; overflow: auto; padding: .5rem }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: .85rem; margin: .2rem 0 }
.table { overflow-x: auto } table { border-collapse: collapse; width: 100% }
th, td { border-bottom: 1px solid var(--rule); padding: .3rem 1.2rem .3rem 0; text-align: left;
  vertical-align: top }
th { color: var(--mute); font-weight: 600 } .number { text-align: right; white-space: nowrap }
.number:last-child { padding-right: 0 }
th { white-space: nowrap } td { overflow-wrap: break-word }
.bar { height: .7rem; vertical-align: baseline; width: 6rem } td:has(.bar) { min-width: 10rem }
.all { fill: var(--rule) } .part { fill: var(--first) }
.progress .bar { display: block; height: .5rem; width: 100% }
figure { margin: .6rem 0 0; min-width: 0 } figcaption { font-size: .9rem }
figcaption { display: flex; flex-wrap: wrap; gap: 0 1.2rem }
.plot { display: grid; font-size: .75rem; grid-template-columns: 3rem minmax(0, 1fr);
  line-height: 1.2;  margin-top: .3rem }
.plot svg { display: block; height: 6rem; overflow: visible; width: 100% }
.y { display: flex; flex-direction: column; justify-content: space-between; padding-right: .5rem;
  text-align: right }
.x { display: grid; grid-column: 2; grid-template-columns: repeat(3, 1fr); margin-top: .25rem }
.x span { text-align: center } .x :first-child { text-align: left }
.x :last-child { text-align: right }
.heat { grid-template-columns: 4.5rem minmax(0, 1fr); --row: 1.1rem }
.dense { --row: .5rem } .plot.heat svg { height: calc(var(--rows) * var(--row)) }
.heat .y { justify-content: flex-start }
.heat .y span { height: var(--row); line-height: var(--row); white-space: nowrap }
path { fill: none; stroke-linejoin: round; vector-effect: non-scaling-stroke }
.grid { stroke: var(--rule) } .line0, .line1 { stroke-linecap: round; stroke-width: 2 }
.line0 { stroke: var(--first) } .line1 { stroke: var(--second); stroke-dasharray: 6 4 }
.key0::before, .key1::before { border-top: 3px solid var(--first); content: "";
  display: inline-block; margin-right: .5ch; vertical-align: middle; width: 1.4rem }
.key1::before { border-top: 3px dashed var(--second) }
.heat0 { background: var(--heat0); fill: var(--heat0) }
.heat1 { background: var(--heat1); fill: var(--heat1) }
.heat2 { background: var(--heat2); fill: var(--heat2) }
.heat3 { background: var(--heat3); fill: var(--heat3) }
.heat4 { background: var(--heat4); fill: var(--heat4) }
.legend { display: inline-flex; flex-wrap: wrap; gap: 0 .8rem }
.legend i { border: 1px solid var(--rule); display: inline-block; height: .8rem; margin-right: .4ch;
  vertical-align: middle; width: 1.1rem }
.zoom { display: flex; flex-wrap: wrap; gap: .2rem .9rem } .zoom [aria-current] { font-weight: 700 }
@media (min-width: 100rem) { .pair { display: grid; gap: 0 3rem;
  grid-template-columns: repeat(2, minmax(0, 1fr)) } }
@media (max-width: 40rem) { th, td { padding-right: .8rem } .bar { width: 3.5rem } }
"""
